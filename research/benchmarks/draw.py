"""The ideal timelines with a flush per mini-batch and without, from the schedules themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_asyncpp.core.schedule import Kind, Schedule
from lightning_asyncpp.core.simulation import simulate
from lightning_asyncpp.core.trace import Span
from research.benchmarks.ideal import make_schedules
from research.benchmarks.options import parse_options
from research.benchmarks.timelines import COLOURS, Panel, draw_panels

_VERSIONS = (("#a8caee", "#6fa3dc"), ("#f6cf9b", "#e8a557"), ("#b3dfc2", "#72bd8e"), ("#dcbfea", "#b787cf"))
"""Colours of forwards and backwards, by weight version."""


@dataclass(frozen=True)
class Draw:
    """Draw both schedules below each other; colours are weight versions, numbers are microbatches.

    Attributes:
        backward: time of a backward; a forward takes 1.
        staleness: "uniform" (PipeDream-2BW) or "least", of the one without a flush.
        svg: file to write.
    """

    stages: int = 4
    microbatches: int = 4
    mini_batches: int = 3
    lookahead: int = 0
    backward: float = 2.0
    staleness: str = "uniform"
    svg: str = "ideal.svg"


def main(argv: Sequence[str]) -> None:
    """Draw the timelines that the command line asks for."""
    draw = parse_options(Draw, "draw", argv)
    panels = []
    no_flush = f"no flush, staleness {draw.staleness}"
    for title, delay, ahead in (("1F1B, a flush per mini-batch", 0, 0), (no_flush, 1, draw.lookahead)):
        schedules = make_schedules(draw.stages, delay, ahead, draw.staleness)
        lanes = simulate(schedules, draw.mini_batches, draw.microbatches, 1.0, draw.backward)
        panels += [Panel(title, lanes, colour=_by_version(schedules, lanes, draw.microbatches), label=_number)]
    length = max(span.end for panel in panels for lane in panel.lanes for span in lane)
    versions = [(f"on W{v}", _VERSIONS[v % 4][0]) for v in range(min(draw.mini_batches, 4))]
    title = f"{draw.stages} stages, {draw.microbatches} microbatches per mini-batch: forwards light, backwards dark"
    draw_panels(draw.svg, title, panels, length, "time", legend=[*versions, ("update", COLOURS[Kind.UPDATE])])


def _number(span: Span) -> str:
    return str(span.index)


def _by_version(
    schedules: Sequence[Schedule], lanes: Sequence[Sequence[Span]], microbatches: int
) -> Callable[[Span], str]:
    stage_of = {id(span): stage for stage, lane in enumerate(lanes) for span in lane}

    def colour(span: Span) -> str:
        if span.kind is Kind.UPDATE:
            return COLOURS[Kind.UPDATE]
        rule = schedules[stage_of[id(span)]].stage_rule
        return _VERSIONS[rule.version(*divmod(span.index, microbatches)) % 4][span.kind is Kind.BACKWARD]

    return colour

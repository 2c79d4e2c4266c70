"""``asyncpp bench draw``: the ideal timelines of a flush per mini-batch and of none, from the schedules themselves."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_asyncpp.core.schedule import Schedule, StalenessRule
from lightning_asyncpp.core.simulation import simulate
from lightning_asyncpp.core.trace import Span
from lightning_asyncpp.tools.bench.harness.checked_arguments import check_shape
from lightning_asyncpp.tools.bench.parsers import draw_parser
from lightning_asyncpp.tools.bench.timeline import Axis, Panel, by_version, draw_timelines, version_style


def main(argv: Sequence[str] | None = None) -> None:
    """Draw to a file."""
    parser = draw_parser()
    arguments = parser.parse_args(argv)
    check_shape(parser, arguments, [arguments.micro_batches])
    picture = draw_schedules(
        arguments.stages, arguments.micro_batches, arguments.mini_batches, arguments.lookahead, arguments.backward
    )
    with open(arguments.svg, "w", encoding="utf-8") as file:
        file.write(picture)


def draw_schedules(
    stages: int, micro_batches: int, mini_batches: int = 3, lookahead: int = 0, backward: float = 2.0
) -> str:
    """Draw the synchronous and the asynchronous schedule below each other, as an SVG document.

    Args:
        stages: number of stages.
        micro_batches: per mini-batch.
        mini_batches: how many.
        lookahead: extra micro-batches in flight of the asynchronous schedule.
        backward: time of a backward; a forward takes 1.
    """
    panels, length = [], 0.0
    for name, ahead, delay in (("1F1B, a flush per mini-batch", 0, 0), ("2BW, no flush", lookahead, 1)):
        schedules = [Schedule(stage, stages, ahead, StalenessRule(delay)) for stage in range(stages)]
        lanes = simulate(schedules, mini_batches, micro_batches, 1.0, backward)
        panels.append(Panel(name, lanes, 0.0, by_version(schedules[0], micro_batches)))
        length = max(length, _end(lanes))
    title = f"{stages} stages, {micro_batches} micro-batches per mini-batch: colours are weight versions"
    return draw_timelines(title, panels, Axis(length, 1.0, "time"), _legend(mini_batches))


def _end(lanes: Sequence[Sequence[Span]]) -> float:
    return max(span.end for lane in lanes for span in lane)


def _legend(mini_batches: int) -> list[tuple[str, str]]:
    versions = [
        (f"{version_style(v, light=True)}/{version_style(v, light=False)}", f"on W{v}: forward, backward")
        for v in range(min(mini_batches, 4))
    ]
    return [*versions, ("update", "update"), ("lane", "idle")]

"""``asyncpp bench schedule``: how busy do schedules keep stages that sleep?

Every stage is a process that sleeps in its forward and in its backward, so that the result depends on the schedule and
on the work around it, hardly on the machine. All systems run in the same processes, in turn, again and again.

What is measured: per mini-batch, the elapsed time in the steady state, and the utilisation: time inside a stage's own
sleeps over elapsed time, on the busiest stage. Both Lightning strategies run through an ordinary Trainer that logs the
loss; torch's schedules, and the asynchronous one in Fabric, run in a plain loop; all take an SGD step per mini-batch
and get the same batches and loss. The floor sleeps and steps as often, without messages, neighbours or Trainer.

What is not: memory, the time to load data, start-up, and the last mini-batch, after which an asynchronous pipeline
drains. Messages are small. Evaluation and checkpoints drain too, and cost what a flush costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt

from lightning_asyncpp.pipeline.trace import Span
from lightning_asyncpp.tools.bench.arguments import check_shape, make_parser
from lightning_asyncpp.tools.bench.job import (
    ASYNC,
    ASYNC_CLIPPED,
    ASYNC_FABRIC,
    ASYNC_FRESH,
    FLOOR,
    GPIPE,
    ONE_F_ONE_B,
    SYNC,
    Job,
    spans_to_json,
)
from lightning_asyncpp.tools.bench.launch import Measured, measure
from lightning_asyncpp.tools.bench.report import as_json, clipping_cost, machine, summarise, table, write_json
from lightning_asyncpp.tools.timeline import Axis, Panel, draw_timelines

_SHOWN_BATCHES = 3


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    check_shape(parser, arguments, [arguments.micro_batches])
    job = _job(arguments)
    measured = measure(job, arguments.timeout)
    lines = summarise(job, measured)
    print(f"{job.stages} stages, {job.micro_batches} micro-batches of {job.forward_ms:g} + {job.backward_ms:g} ms")
    print(table(lines))
    cost = clipping_cost(job, measured)
    if cost is not None:
        print(f"clipping costs {cost:+.1%}")
    if arguments.json:
        write_json(arguments.json, as_json(job, lines, measured, clipping_cost=cost))
    if arguments.trace:
        write_json(arguments.trace, _traces(job, measured))
    if arguments.svg:
        with open(arguments.svg, "w", encoding="utf-8") as file:
            file.write(_drawing(job, measured))


def _parser() -> ArgumentParser:
    parser = make_parser("schedule", "Utilisation of sleeping stages under every schedule.")
    parser.add_argument("--stages", type=PositiveInt, default=8, help="number of stages, one process each")
    parser.add_argument("--micro-batches", type=PositiveInt, default=8, help="micro-batches per mini-batch")
    parser.add_argument("--forward-ms", type=PositiveFloat, default=20.0, help="sleep of a forward, in ms")
    parser.add_argument("--backward-ms", type=PositiveFloat, default=40.0, help="sleep of a backward, in ms")
    parser.add_argument("--clip", action="store_true", help="run the asynchronous pipeline with clipping as well")
    parser.add_argument("--fresh-last-stage", action="store_true", help="and with a fresh last stage")
    parser.add_argument("--trace", type=str | None, default=None, help="write the engine's spans to this JSON file")
    parser.add_argument("--svg", type=str | None, default=None, help="draw the measured timelines to this file")
    return parser


def _job(arguments: Namespace) -> Job:
    clipped = [ASYNC_CLIPPED] if arguments.clip else []
    fresh = [ASYNC_FRESH] if arguments.fresh_last_stage else []
    systems = (ASYNC, *clipped, *fresh, ASYNC_FABRIC, SYNC, ONE_F_ONE_B, GPIPE, FLOOR)
    return Job(
        "sleep", arguments.stages, arguments.micro_batches, systems,
        arguments.repeats, arguments.mini_batches, arguments.warm_up, arguments.lookahead,
        arguments.forward_ms, arguments.backward_ms, traced=bool(arguments.trace or arguments.svg),
    )  # fmt: skip


def _traces(job: Job, measured: Measured) -> dict[str, object]:
    """Spans [kind, index, start, end] of the first repeat, per system and stage; seconds of one common clock."""
    spans = {s: [spans_to_json(run.trace) for run in measured.runs[s][0]] for s in (ASYNC, SYNC)}
    return {"machine": machine(), "stages": job.stages, "micro_batches": job.micro_batches, "spans": spans}


def _drawing(job: Job, measured: Measured) -> str:
    """A few mini-batches of both engines in the steady state, on the same time scale."""
    panels = []
    length = 0.0
    for system, name in ((SYNC, "sync_pipeline: 1F1B, a flush per mini-batch"), (ASYNC, "async_pipeline: no flush")):
        ranks = measured.runs[system][0]
        start = ranks[0].marks[job.warm_up - 1]
        shown = min(_SHOWN_BATCHES, job.mini_batches)
        length = max(length, ranks[0].marks[job.warm_up - 1 + shown] - start)
        busy = next(line.utilisation.median for line in summarise(job, measured) if line.system == system)
        lanes: list[list[Span]] = [run.trace for run in ranks]
        panels.append(Panel(f"{name} (busiest stage {busy:.0%} busy)", lanes, start))
    title = f"Measured: {job.stages} stages, {job.micro_batches} micro-batches per mini-batch"
    return draw_timelines(title, panels, Axis(length))

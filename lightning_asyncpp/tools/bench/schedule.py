"""``asyncpp bench schedule``: how busy do schedules keep stages that sleep?

Every stage is a process that sleeps in its forward and in its backward, so that the result depends on the schedule
and on the work around it, hardly on the machine: 32 stages run on two cores. All systems run in the same processes,
in turn, again and again, and every repeat begins with another one.

What is measured: per mini-batch, the elapsed time in the steady state, and the utilisation: time inside a stage's own
sleeps over elapsed time, on the busiest stage. Both Lightning strategies run as users run them, through an ordinary
Trainer that loads and collates samples, logs the loss in every step and clips gradients; torch's schedules, and the
asynchronous one in Fabric, run in a plain loop, on batches that are there, and clip nothing; all take an SGD step per
mini-batch and get the same batches and loss. The floor sleeps and steps as often, without messages, neighbours or
Trainer; ``of the floor`` is a system's throughput relative to it, paired within a repeat.

torch's interleaved schedules have two chunks per process that sleep half as long each. Its zero-bubble schedules run
the gradients of inputs and of weights apart: the backward's sleep is divided between the two (``--weight-share``).
ZBV promises no bubble where forward, input's and weight's gradient take equally long, as they do by default, and with
at least twice as many micro-batches as stages; with fewer, some is left. A system that cannot run gets a line that
says why.

``--jitter SIGMA`` multiplies each sleep by a lognormal factor that depends on the seed, the stage, the micro-batch
and whether it is a forward or a backward: all systems, and every repeat, sleep alike. The floor shows what the
longest row of sleeps leaves.

``--hosts 2`` puts the halves of the pipeline into two network namespaces with a link between them, for every system
alike; see :mod:`lightning_asyncpp.tools.bench.harness.relay`. The relay is a program and adds to the latency that was
asked for: what a packet really took is printed. Interleaved schedules and ZBV cross the link more often: that is
theirs.

What is not: memory, the time to load data, start-up, and the last mini-batch, after which an asynchronous pipeline
drains. Messages are small. Evaluation and checkpoints drain too, and cost what a flush costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import Span
from lightning_asyncpp.tools.bench.harness.checked_arguments import (
    check_shape,
    chosen_systems,
)
from lightning_asyncpp.tools.bench.harness.comparison import (
    as_json,
    costs_of_extras,
    costs_text,
    facts_line,
    machine,
    summarise,
    table,
    utilisation_of,
)
from lightning_asyncpp.tools.bench.harness.job import Job
from lightning_asyncpp.tools.bench.harness.measure import Measured, measure
from lightning_asyncpp.tools.bench.names import ASYNC, SYNC
from lightning_asyncpp.tools.bench.parsers import schedule_parser
from lightning_asyncpp.tools.bench.timeline import Axis, Panel, draw_timelines
from lightning_asyncpp.tools.text import write_json

_SHOWN_BATCHES = 3


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    parser = schedule_parser()
    arguments = parser.parse_args(argv)
    check_shape(parser, arguments, [arguments.micro_batches])
    traced = bool(arguments.trace or arguments.svg)
    job = Job.of(arguments, "sleep", systems=chosen_systems(arguments), traced=traced)
    measured = measure(job, arguments.timeout)
    lines = summarise(job, measured)
    jitter = f", jitter {job.jitter:g} (seed {job.seed})" if job.jitter else ""
    print(
        f"{job.stages} stages, {job.micro_batches} micro-batches of {job.forward_ms:g} + {job.backward_ms:g} ms{jitter}"
    )
    print(facts_line(measured.facts))
    print(table(lines, measured.failures))
    costs = costs_of_extras(job, measured)
    print(costs_text(costs), end="")
    if arguments.json:
        write_json(arguments.json, as_json(job, lines, measured, costs))
    if arguments.trace:
        write_json(arguments.trace, _traces(job, measured))
    if arguments.svg:
        with open(arguments.svg, "w", encoding="utf-8") as file:
            file.write(_drawing(job, measured))


def _traces(job: Job, measured: Measured) -> dict[str, object]:
    """Spans [kind, index, start, end] of the first repeat, per system and stage; seconds of one common clock."""
    spans = {s: [_plain(run.trace) for run in measured.runs[s][0]] for s in (ASYNC, SYNC) if s in measured.runs}
    return {"machine": machine(), "stages": job.stages, "micro_batches": job.micro_batches, "spans": spans}


def _plain(spans: Sequence[Span]) -> list[list[object]]:
    """Forwards, backwards and updates; waits and sends are left out."""
    return [[span.kind.value, span.index, span.start, span.end] for span in spans if isinstance(span.kind, Kind)]


def _drawing(job: Job, measured: Measured) -> str:
    """A few mini-batches of both engines in the steady state, on the same time scale."""
    panels = []
    length = 0.0
    for system, name in ((SYNC, "sync_pipeline: 1F1B, a flush per mini-batch"), (ASYNC, "async_pipeline: no flush")):
        if system not in measured.runs:
            continue
        ranks = measured.runs[system][0]
        start = ranks[0].marks[job.warm_up - 1]
        shown = min(_SHOWN_BATCHES, job.mini_batches)
        length = max(length, ranks[0].marks[job.warm_up - 1 + shown] - start)
        busy = max(utilisation_of(run, job) for run in ranks)
        lanes: list[list[Span]] = [run.trace for run in ranks]
        panels.append(Panel(f"{name} (busiest stage {busy:.0%} busy)", lanes, start))
    title = f"Measured: {job.stages} stages, {job.micro_batches} micro-batches per mini-batch"
    return draw_timelines(title, panels, Axis(length))

"""``asyncpp bench compute``: what does an asynchronous pipeline gain when stages really compute?

Every stage is a process with one thread, pinned to a core of its own where there are enough, that runs a chain of x +
norm(x) @ w. Its length is calibrated so that forward and backward of a micro-batch take about ``--target-ms``. All
systems run in the same processes, in turn, again and again; every repeat begins with another one, so that a host that
gets slower or faster meets all alike.

What is measured: as for ``asyncpp bench schedule``, and how the gain over torch's measured Schedule1F1B compares with
1 + (P - 1) / m, the gain of an ideal asynchronous pipeline over an ideal 1F1B: ``gain / ideal``. The measured 1F1B is
no ideal one, so a share above 1 is possible. Gradients of weights that run apart (zero bubble) are inside the time,
but not seen by the markers that the utilisation comes from: it is left out there. Messages (``rows`` x ``width``
floats), the update and all work of the framework share the cores with the computation, as they do in training on
CPUs. The floor computes and steps as much, without messages, neighbours or Trainer; but cores that never wait may
also clock lower.

What is not: memory, data loading (all get batches that are there; ours through the Trainer log and clip), start-up.
Messages stay on this machine, unless ``--hosts 2`` puts a link between the halves of the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_asyncpp.tools.bench.harness.checked_arguments import (
    check_shape,
    chosen_systems,
)
from lightning_asyncpp.tools.bench.harness.comparison import (
    as_json,
    costs_of_extras,
    costs_text,
    facts_line,
    summarise,
    table,
)
from lightning_asyncpp.tools.bench.harness.job import Job
from lightning_asyncpp.tools.bench.harness.measure import measure
from lightning_asyncpp.tools.bench.parsers import compute_parser
from lightning_asyncpp.tools.text import write_json


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark for every number of micro-batches and print its tables."""
    parser = compute_parser()
    arguments = parser.parse_args(argv)
    check_shape(parser, arguments, arguments.micro_batches)
    results: list[dict[str, Any]] = []
    for micro_batches in arguments.micro_batches:
        job = Job.of(
            arguments, "compute", systems=chosen_systems(arguments), micro_batches=micro_batches, pinned=arguments.pin
        )
        measured = measure(job, arguments.timeout)
        lines = summarise(job, measured)
        ideal = 1 + (job.stages - 1) / micro_batches
        print(
            f"{job.stages} stages, {micro_batches} micro-batches of {measured.facts['calibrated_ms']:.1f} ms:"
            f" ideal gain {ideal:.2f}"
        )
        print(facts_line(measured.facts))
        print(table(lines, measured.failures, ideal))
        costs = costs_of_extras(job, measured)
        print(costs_text(costs))
        results.append(as_json(job, lines, measured, costs, ideal_gain=ideal))
    if arguments.json:
        write_json(arguments.json, results)

"""``asyncpp bench network``: what does a real training gain over a slow network?

A small GPT trains on two hosts of half the stages each, with a link of 100 Mbit/s and 10 ms between them; with
``--replicas 2`` on two hosts of one replica each, so that gradients are what crosses the link. The hosts are network
namespaces of this machine; see :mod:`lightning_asyncpp.tools.bench.harness.relay`. On each of them an ordinary
``torchrun --nnodes 2`` starts an ordinary script (:mod:`lightning_asyncpp.tools.bench.network_training`): our
strategies through the Trainer, torch's Schedule1F1B in a plain loop on the same model, the same cut, batches and
AdamW. Every run is a launch of its own (``--timeout`` is for each, 600 s by default); systems run in turn, and every
repeat begins with another one.

What is measured: the time per mini-batch in the steady state, of the slowest process, and the gain over Schedule1F1B,
paired within a repeat; what other stalenesses cost (``--also async+2bw async+slack1``), paired with ``async``;
and how much of the way from a complete gradient to its update our strategies hide, as ``asyncpp trace`` shows it: with
replicas a stage waits for their reduction where it has no slack, and computes meanwhile where it has some. The loss of
the last mini-batch is shown as a check: ``sync`` and ``1f1b`` train the same.

What is not: start-up, data loading, evaluation, and how far one gets with an update; a part of the gradients of
``async`` is one update old. All processes and the relay share this machine's cores: with fewer cores than stages,
computation overlaps less than it would on two hosts.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lightning_asyncpp.tools.bench.harness.checked_arguments import check_shape, chosen_systems
from lightning_asyncpp.tools.bench.harness.comparison import (
    as_json,
    costs_of_extras,
    costs_text,
    facts_line,
    summarise,
    table,
)
from lightning_asyncpp.tools.bench.harness.hosts import Hosts, open_hosts, wait_for
from lightning_asyncpp.tools.bench.harness.job import Job, RankRun
from lightning_asyncpp.tools.bench.harness.measure import Measured
from lightning_asyncpp.tools.bench.names import ONE_F_ONE_B, TITLES
from lightning_asyncpp.tools.bench.network_training import TRACE
from lightning_asyncpp.tools.bench.parsers import NETWORK_EXTRAS, NETWORK_SYSTEMS, network_parser
from lightning_asyncpp.tools.processes import Children, end_of, free_port, sigterm_raises
from lightning_asyncpp.tools.text import Spread, write_json
from lightning_asyncpp.tools.trace.recorded_run import read_run
from lightning_asyncpp.tools.trace.summary import summarise as summarise_trace

_SCRIPT = "lightning_asyncpp.tools.bench.network_training"
_SIZES = ("layers", "dim", "context", "rows")
_PORT = 29500  # nobody else is in the namespace
_RUN_SECONDS = 600.0


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    parser = network_parser()
    arguments = parser.parse_args(argv)
    check_shape(parser, arguments, [arguments.micro_batches], NETWORK_SYSTEMS, NETWORK_EXTRAS)
    job = Job.of(arguments, "train", systems=chosen_systems(arguments))
    measured, losses, hidden = _measure(job, arguments)
    lines = summarise(job, measured)
    message = arguments.rows * arguments.context * arguments.dim * 4
    print(
        f"{job.stages} stages, replicas: {arguments.replicas}, hosts: {job.hosts}; {job.micro_batches} micro-batches of"
        f" {arguments.rows} x {arguments.context} tokens, messages of {message / 1e3:.0f} kB"
    )
    print(facts_line(measured.facts))
    print(table(lines))
    costs = costs_of_extras(job, measured)
    print(costs_text(costs), end="")
    for system, values in losses.items():
        print(f"loss of the last mini-batch, {system}: {Spread.of(values).format(4)}")
    for system, values in hidden.items():
        print(f"hidden of the way from a gradient to its update, {system}: {Spread.of(values).format(3)}")
    if arguments.json:
        more = {"losses": losses, "hidden": hidden, "message_bytes": message}
        write_json(arguments.json, as_json(job, lines, measured, costs, **more))


def _measure(job: Job, arguments: Namespace) -> tuple[Measured, dict[str, list[float]], dict[str, list[float]]]:
    """Run all systems in turn; returns what they measured, the last losses, and what of the updates was hidden."""
    runs: dict[str, list[list[RankRun]]] = {system: [] for system in job.systems}
    losses: dict[str, list[float]] = {system: [] for system in job.systems}
    hidden: dict[str, list[float]] = {system: [] for system in job.systems if system != ONE_F_ONE_B}
    with tempfile.TemporaryDirectory(prefix="asyncpp-bench-") as name, sigterm_raises():
        folder = Path(name)
        with open_hosts(job.hosts, job.link_latency_ms, job.link_mbit, folder) as hosts:
            for repeat in range(job.repeats):
                for system in job.order(repeat):
                    ranks = _train(job, system, arguments, hosts, folder)
                    runs[system].append([RankRun(system, r["stage"], [], r["marks"], []) for r in ranks])
                    losses[system].append(statistics.fmean([r["loss"] for r in ranks if r["loss"] is not None]))
                    if system in hidden:
                        hidden[system].append(_hidden(folder))
                    print(
                        f"repeat {repeat + 1} of {job.repeats}: {TITLES[system]} is done", file=sys.stderr, flush=True
                    )
        return Measured(runs, hosts.facts), losses, hidden


def _hidden(folder: Path) -> float:
    """Share of the way from a gradient to its update that no stage waited for, from the trace, which is removed."""
    hidden = summarise_trace(read_run(folder / TRACE)).total.hidden
    shutil.rmtree(folder / TRACE)
    assert hidden is not None, "agreements are always recorded"
    return hidden


def _train(job: Job, system: str, arguments: Namespace, hosts: Hosts, folder: Path) -> list[dict[str, Any]]:
    """One training: torchrun on every host; returns what the ranks wrote."""
    (folder / "run.json").write_text(json.dumps({**_settings(job, arguments), "system": system}))
    with Children(folder) as children:
        for host in range(job.hosts):
            ranks = job.stages * arguments.replicas // job.hosts
            children.start(f"host-{host}", _torchrun(hosts, host, ranks, folder), _environment(hosts))
        wait_for(
            children, arguments.timeout or _RUN_SECONDS,
            lambda failed: f"torchrun of {failed} failed:\n{end_of(children.log(failed))}",
        )  # fmt: skip
    return [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(job.stages * arguments.replicas)]


def _settings(job: Job, arguments: Namespace) -> dict[str, Any]:
    sizes = {name: arguments[name] for name in (*_SIZES, "lr", "replicas")}
    shape = {"stages": job.stages, "hosts": job.hosts, "micro_batches": job.micro_batches, "lookahead": job.lookahead}
    return {**sizes, **shape, "mini_batches": job.total_batches}


def _torchrun(hosts: Hosts, host: int, ranks: int, folder: Path) -> list[str]:
    count = len(hosts.prefixes)
    nodes = ["--nnodes", str(count), "--node-rank", str(host), "--nproc-per-node", str(ranks)]
    port = _PORT if count > 1 else free_port()
    meeting = ["--master-addr", hosts.addresses[0], "--master-port", str(port), "--local-addr", hosts.addresses[host]]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    return [*hosts.prefixes[host], *torchrun, *nodes, *meeting, "-m", _SCRIPT, str(folder)]


def _environment(hosts: Hosts) -> dict[str, str]:
    return {**hosts.environment, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

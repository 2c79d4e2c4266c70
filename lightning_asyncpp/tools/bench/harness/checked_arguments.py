"""What the benchmarks' shared arguments say, and their check against the pipeline's own rules: all problems at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jsonargparse import ArgumentParser, Namespace

from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.tools.bench.harness.hosts import problems_of_hosts
from lightning_asyncpp.tools.bench.names import (
    ASYNC,
    ASYNC_MONITORED,
    ASYNC_TRACED,
    EXTRAS,
    TITLES,
    problems_of_systems,
)


def chosen_systems(arguments: Namespace) -> tuple[str, ...]:
    """What is compared, in the order of :data:`TITLES`."""
    return tuple(name for name in TITLES if name in (*arguments.systems, *arguments.get("also", [])))


def check_shape(
    parser: ArgumentParser,
    arguments: Namespace,
    micro_batches: Sequence[int],
    known: Iterable[str] = TITLES,
    extras: Iterable[str] = EXTRAS,
) -> None:
    """End with a message if the pipeline would refuse this shape, the link cannot be made, or systems are not known.

    Args:
        parser: of the benchmark.
        arguments: that it parsed.
        micro_batches: per mini-batch; all numbers that are to be run.
        known: what ``--systems`` may name.
        extras: what ``--also`` may name.
    """
    problems = []
    if arguments.stages < 2:
        problems.append(f"--stages {arguments.stages}: a pipeline to compare has at least 2 stages")
    if "systems" in arguments:
        problems += problems_of_systems(arguments.systems, known)
    also = arguments.get("also", [])
    problems += problems_of_systems(also, extras, "--also")
    problems += _problems_of_extras(arguments)
    if "systems" not in arguments or any(name.startswith(ASYNC) for name in (*arguments.systems, *also)):
        for count in micro_batches:
            settings = PipelineSettings(count, arguments.lookahead, data_parallel_size=_replicas(arguments))
            _, more = settings.resolve(arguments.stages * _replicas(arguments))
            problems += more
    if "hosts" in arguments:
        problems += _problems_of_link(arguments)
    if problems:
        parser.error("; ".join(problems))


def _problems_of_extras(arguments: Namespace) -> list[str]:
    if not arguments.get("also"):
        return []
    problems = []
    if ASYNC not in arguments.systems:
        problems.append(f"--also compares with {ASYNC!r}, which --systems lacks: add it")
    recorded = {ASYNC_TRACED, ASYNC_MONITORED} & set(arguments.also)
    if recorded and (arguments.get("trace") or arguments.get("svg")):
        problems.append(
            f"--also {' '.join(sorted(recorded))}: with --trace or --svg every system records, so that its price would"
            " not show; run them apart"
        )
    return problems


def _problems_of_link(arguments: Namespace) -> list[str]:
    if arguments.hosts == 1:
        if arguments.link_latency_ms or arguments.link_mbit:
            return ["--link-latency-ms and --link-mbit are of the link between two hosts: use --hosts 2"]
        return []
    if arguments.hosts > 2:
        return [f"--hosts {arguments.hosts}: there are 1 or 2"]
    problems = problems_of_hosts()
    if arguments.stages * _replicas(arguments) % 2:
        problems.append(f"--hosts 2 needs an even number of stages, not {arguments.stages}")
    return problems


def _replicas(arguments: Namespace) -> int:
    replicas: int = arguments.get("replicas", 1)
    return replicas

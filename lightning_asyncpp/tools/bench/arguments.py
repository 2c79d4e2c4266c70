"""Arguments that both benchmarks share, and their check against the pipeline's own rules."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from lightning_asyncpp.pipeline.settings import PipelineSettings


def make_parser(name: str, description: str) -> ArgumentParser:
    """A parser with the arguments of every benchmark."""
    parser = ArgumentParser(prog=f"asyncpp bench {name}", description=description)
    parser.add_argument(
        "--lookahead", type=NonNegativeInt | None, default=None, help="extra micro-batches in flight (default: auto)"
    )
    parser.add_argument("--mini-batches", type=PositiveInt, default=20, help="measured mini-batches per repeat")
    parser.add_argument("--warm-up", type=PositiveInt, default=3, help="mini-batches before them")
    parser.add_argument("--repeats", type=PositiveInt, default=3, help="how often every system is measured, in turn")
    parser.add_argument("--timeout", type=PositiveFloat, default=1800.0, help="seconds until all processes are killed")
    parser.add_argument("--json", type=str | None, default=None, help="write the results to this file")
    return parser


def check_shape(parser: ArgumentParser, arguments: Namespace, micro_batches: Sequence[int]) -> None:
    """End with a message if the asynchronous pipeline would refuse this shape."""
    problems = []
    if arguments.stages < 2:
        problems.append(f"--stages {arguments.stages}: a pipeline to compare has at least 2 stages")
    for count in micro_batches:
        _, more = PipelineSettings(count, arguments.lookahead).resolve(arguments.stages)
        problems += more
    if problems:
        parser.error("; ".join(problems))

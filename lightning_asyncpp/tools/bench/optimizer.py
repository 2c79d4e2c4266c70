"""``asyncpp bench optimizer``: how long does an update take, and what does Error Feedback add to it?

Every system has its own copy of a stage's weights and steps it with the same gradients; the sizes are those of
SmolLM-360M, of which a stage of four has 8 layers. First all take two steps, and their weights are compared:
Newton-Schulz runs in bfloat16 everywhere, with the same steps and coefficients. Then systems take turns, in an order
that changes, and ratios are taken within a turn.

What is measured: the step alone, on ``--threads`` threads or on a GPU. Error Feedback is measured around an optimizer
that does nothing, because its cost is smaller than the noise of a step; then as a share of an update after so many
tokens, with forward and backward of the same stage measured here.

What is not: the strategies' own work, and the reduction of gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from jsonargparse import ArgumentParser, Namespace

from lightning_asyncpp.tools.bench.names import OPTIMIZERS, TORCH
from lightning_asyncpp.tools.bench.optimizer_report import Difference, Report
from lightning_asyncpp.tools.bench.optimizer_stage import StageShape, TrainingWork, make_gradients, set_gradients
from lightning_asyncpp.tools.bench.optimizer_systems import (
    EXACT,
    Contender,
    FeedbackAlone,
    MissingError,
)
from lightning_asyncpp.tools.bench.parsers import optimizer_parser
from lightning_asyncpp.tools.bench.report import write_json

COMPARED_STEPS = 2
FEEDBACK, WORK = "feedback", "work"


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the results, time the systems and print the table."""
    parser = optimizer_parser()
    arguments = parser.parse_args(argv)
    shape = _shape(parser, arguments)
    device = torch.device(arguments.device)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    contenders, missing = _contenders(arguments.systems, shape, device)
    differences = _compare(contenders, shape, device)
    actions: dict[str, Callable[[], None]] = {name: contender.step for name, contender in contenders.items()}
    if arguments.error_feedback:
        stage = shape.build(device)
        actions[FEEDBACK] = FeedbackAlone(stage).step
        actions[WORK] = TrainingWork(shape, stage, arguments.bfloat16).run
    times = measure(actions, arguments.repeats, device)
    report = Report(vars(arguments.clone()), torch.get_num_threads(), times, differences, missing, shape.context)
    print(report.text())
    if arguments.json:
        write_json(arguments.json, report.as_json())


def measure(actions: Mapping[str, Callable[[], None]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of every action in every repeat, after one that is not counted; the order turns round each time."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(repeats + 1):
        names = list(actions)
        for name in names if repeat % 2 else reversed(names):
            _synchronize(device)
            started = time.perf_counter()
            actions[name]()
            _synchronize(device)
            if repeat:
                times[name].append(time.perf_counter() - started)
    return times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _contenders(
    systems: Sequence[str], shape: StageShape, device: torch.device
) -> tuple[dict[str, Contender], dict[str, str]]:
    contenders, missing = {}, {}
    for system in systems:
        try:
            contenders[system] = Contender(system, shape.build(device))
        except MissingError as error:
            missing[system] = str(error)
    return contenders, missing


def _compare(contenders: Mapping[str, Contender], shape: StageShape, device: torch.device) -> dict[str, Difference]:
    start = list(shape.build(device).parameters())
    gradients = make_gradients(shape.build(device))
    for contender in contenders.values():
        for _ in range(COMPARED_STEPS):
            set_gradients(contender.parameters, gradients)
            contender.step()
    reference = contenders[TORCH].parameters
    return {
        system: Difference.between(start, contender.parameters, reference, must_be_equal=system in EXACT)
        for system, contender in contenders.items()
        if system != TORCH
    }


def _shape(parser: ArgumentParser, arguments: Namespace) -> StageShape:
    shape = StageShape(
        arguments.layers, arguments.width, arguments.heads, arguments.kv_heads, arguments.mlp, arguments.vocab,
        arguments.context,
    )  # fmt: skip
    try:
        shape.config()
    except ValueError as error:
        parser.error(str(error))
    if TORCH not in arguments.systems:
        parser.error(f"--systems lacks {TORCH!r}, which the others are compared with")
    unknown = [system for system in arguments.systems if system not in OPTIMIZERS]
    if unknown:
        parser.error(f"--systems {unknown}: there are {', '.join(OPTIMIZERS)}")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch sees no GPU here; use --device cpu")
    return shape

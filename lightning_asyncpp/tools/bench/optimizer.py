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

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor

from lightning_asyncpp.tools.bench.harness.comparison import machine
from lightning_asyncpp.tools.bench.names import OPTIMIZERS, OURS, TORCH
from lightning_asyncpp.tools.bench.optimizer_contenders import (
    EXACT,
    ROUNDING,
    Contender,
    FeedbackAlone,
    MissingError,
    StageShape,
    TrainingWork,
    make_gradients,
    set_gradients,
)
from lightning_asyncpp.tools.bench.parsers import optimizer_parser
from lightning_asyncpp.tools.text import Spread, aligned, write_json

COMPARED_STEPS = 2
FEEDBACK, WORK = "feedback", "work"
SHARE = 0.02
"""What Error Feedback may cost of a training step."""

TOKENS = (2**12, 2**14, 2**16, 2**19)
"""Per update, for the table of shares."""


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


@dataclass(frozen=True)
class Difference:
    """How far a system's weights are from those of torch after the same steps.

    Attributes:
        largest: of all entries, absolute.
        relative: norm of the difference over the norm of the step.
        must_be_equal: whether the system claims the same result, to rounding.
    """

    largest: float
    relative: float
    must_be_equal: bool

    @classmethod
    def between(
        cls, start: Sequence[Tensor], own: Sequence[Tensor], reference: Sequence[Tensor], must_be_equal: bool
    ) -> Difference:
        """Compare the weights of all parameters."""
        pairs = [(p.detach() - q.detach()) for p, q in zip(own, reference)]
        steps = [(q.detach() - s.detach()) for q, s in zip(reference, start)]
        largest = max(pair.abs().max().item() for pair in pairs)
        return cls(largest, _norm(pairs) / _norm(steps), must_be_equal)

    @property
    def equal(self) -> bool:
        """To rounding."""
        return self.relative <= ROUNDING

    def text(self) -> str:
        """For the table."""
        verdict = "" if not self.must_be_equal else " = to rounding" if self.equal else " NOT EQUAL"
        return f"{self.largest:.1e} ({self.relative:.1e} of the step){verdict}"


@dataclass(frozen=True)
class Report:
    """Everything that was measured.

    Attributes:
        settings: the command's arguments.
        threads: that torch used.
        times: seconds of every action in every repeat.
        differences: from torch, by system.
        missing: system -> why it was left out.
        context: tokens of one forward and backward.
    """

    settings: Mapping[str, Any]
    threads: int
    times: Mapping[str, Sequence[float]]
    differences: Mapping[str, Difference]
    missing: Mapping[str, str]
    context: int

    def text(self) -> str:
        """The tables."""
        rows = [["system", "ms per step", "speed over torch", "largest difference from torch"]]
        for system in self.systems:
            rows.append([OPTIMIZERS[system], _ms(self.times[system]).format(1), *self._comparison(system)])
        rows += [[OPTIMIZERS[system], "left out:", why, ""] for system, why in self.missing.items()]
        where = "on a GPU" if str(self.settings["device"]) != "cpu" else f"on {self.threads} CPU threads"
        head = f"one update of {self.settings['layers']} layers and {self.settings['vocab']} embeddings {where}"
        return "\n".join([head, aligned(rows), *self._feedback_text()])

    def as_json(self) -> dict[str, Any]:
        """The tables, the settings and the machine."""
        device = str(self.settings["device"])
        return {
            "settings": {key: value for key, value in self.settings.items() if key != "json"},
            "threads": self.threads,
            "machine": {**machine(), "gpu": None if device == "cpu" else torch.cuda.get_device_name(device)},
            "systems": {
                system: {
                    "milliseconds": asdict(_ms(self.times[system])),
                    "speed_over_torch": asdict(self.speed(system)),
                    "difference": asdict(self.differences[system]) if system in self.differences else None,
                }
                for system in self.systems
            },
            "missing": dict(self.missing),
            "error_feedback": self.feedback(),
        }

    @property
    def systems(self) -> list[str]:
        """That were measured."""
        return [name for name in self.times if name in OPTIMIZERS]

    def speed(self, system: str) -> Spread:
        """Time of torch's step over the system's, pairwise by repeat."""
        return Spread.of([base / own for base, own in zip(self.times[TORCH], self.times[system])])

    def feedback(self) -> dict[str, Any] | None:
        """What Error Feedback adds; None if it was not measured."""
        if FEEDBACK not in self.times or OURS not in self.times:
            return None
        added, work, step = (statistics.median(self.times[name]) for name in (FEEDBACK, WORK, OURS))
        per_token = work / self.context
        return {
            "milliseconds": asdict(_ms(self.times[FEEDBACK])),
            "forward_backward_milliseconds_per_token": per_token * 1e3,
            "share_of_step": added / step,
            "share_of_training_step": {tokens: added / (step + tokens * per_token) for tokens in TOKENS},
            "tokens_per_update_for_2_percent": max(0, round((added / SHARE - step) / per_token)),
        }

    def _comparison(self, system: str) -> tuple[str, str]:
        if system == TORCH:
            return "1.00", ""
        return self.speed(system).format(2), self.differences[system].text()

    def _feedback_text(self) -> list[str]:
        facts = self.feedback()
        if facts is None:
            return []
        shares = ", ".join(f"{share:.2%} at {tokens}" for tokens, share in facts["share_of_training_step"].items())
        return [
            "",
            f"Error Feedback adds {_ms(self.times[FEEDBACK]).format(1)} ms to an update: {facts['share_of_step']:.1%}"
            f" of MuonAdamW's step; forward and backward take {facts['forward_backward_milliseconds_per_token']:.2f} ms"
            " per token.",
            f"Of a training step, by tokens per update: {shares}.",
            f"2 % of it from {facts['tokens_per_update_for_2_percent']} tokens per update on.",
        ]


def _ms(seconds: Sequence[float]) -> Spread:
    return Spread.of([value * 1e3 for value in seconds])


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt())

"""What ``asyncpp bench optimizer`` says: times, ratios, differences, and the share of Error Feedback."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.tools.bench.names import OPTIMIZERS, OURS, TORCH
from lightning_asyncpp.tools.bench.report import Spread, machine

ROUNDING = 0.02
"""Two bfloat16 iterations whose sums are taken in another order differ by about this share of the step; it is their own
distance from an iteration in float32, too."""

SHARE = 0.02
"""What Error Feedback may cost of a training step."""

TOKENS = (2**12, 2**14, 2**16, 2**19)
"""Per update, for the table of shares."""


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
        rows = [("system", "ms per step", "speed over torch", "largest difference from torch")]
        for system in self.systems:
            rows.append((OPTIMIZERS[system], _ms(self.times[system]).format(1), *self._comparison(system)))
        rows += [(OPTIMIZERS[system], "left out:", why, "") for system, why in self.missing.items()]
        where = "on a GPU" if str(self.settings["device"]) != "cpu" else f"on {self.threads} CPU threads"
        head = f"one update of {self.settings['layers']} layers and {self.settings['vocab']} embeddings {where}"
        return "\n".join([head, _aligned(rows), *self._feedback_text()])

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
        if "feedback" not in self.times or OURS not in self.times:
            return None
        added, work, step = (statistics.median(self.times[name]) for name in ("feedback", "work", OURS))
        per_token = work / self.context
        return {
            "milliseconds": asdict(_ms(self.times["feedback"])),
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
            f"Error Feedback adds {_ms(self.times['feedback']).format(1)} ms to an update: {facts['share_of_step']:.1%}"
            f" of MuonAdamW's step; forward and backward take {facts['forward_backward_milliseconds_per_token']:.2f} ms"
            " per token.",
            f"Of a training step, by tokens per update: {shares}.",
            f"2 % of it from {facts['tokens_per_update_for_2_percent']} tokens per update on.",
        ]


def _ms(seconds: Sequence[float]) -> Spread:
    return Spread.of([value * 1e3 for value in seconds])


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt())


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])

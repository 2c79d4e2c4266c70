"""What a check found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_STEP = "6. Every parameter's step follows from its own gradient and options, one step per update"
_ARGUMENTS = (
    "3. What layers need comes through their arguments: attributes, closures and contexts around the call of the model"
    " (autocast, no_grad) do not reach other stages"
)
_BETWEEN = (
    "7. Only the optimizer changes weights, and hooks between batches may be one update behind: call strategy.drain()"
    " first, or use after_own_update(callback)"
)
_LAYERS = "4. Layers run once per microbatch, one after the other, and forward() does nothing else"
_MEAN = (
    "2. The loss is a mean over a microbatch's samples, or micro_batch_weight says by what to weigh it, or"
    " loss_reduction = 'sum'; a loss that needs the whole batch at once does not fit. split_batch cuts batches whose"
    " first dimension is not that of the samples"
)
# (comparison, what differs) -> the sentences of the contract that may explain it
_SENTENCES = {
    ("pieces", "loss"): (_ARGUMENTS, f"{_STEP}: an optimizer that calls its closure again does not fit"),
    ("pieces", "gradient used"): (_ARGUMENTS, f"{_STEP}: a hook sees those of one stage at a time"),
    ("pieces", "value at the end"): (_LAYERS, _BETWEEN),
    ("delayed", "loss"): (_ARGUMENTS, _BETWEEN),
    ("delayed", "gradient used"): (_ARGUMENTS, _BETWEEN),
    ("delayed", "weights"): (_BETWEEN, _STEP),
    ("delayed", "value at the end"): (_BETWEEN,),
    ("whole", "loss"): (_MEAN, _LAYERS),
    ("whole", "gradient used"): (_MEAN, _LAYERS),
}
_MEANINGS = {
    "pieces": "cutting the model, in {1} stages against the whole, both in {2} microbatches",
    "delayed": "the delay, in {1} stages against the rule on the whole model",
    "whole": "cutting batches, whole against in {2} microbatches",
}


@dataclass(frozen=True)
class Difference:
    """The first quantity that differs; ``values``: what is right, and what was found; of a tensor its norm."""

    update: int
    kind: str
    name: str  # of a parameter or buffer
    values: tuple[Any, Any]
    others: int  # parameters that differ in it, too
    comparison: str = ""
    stage: int | None = None
    hint: str = ""  # what was found to make it right

    def __str__(self) -> str:
        place = f" of {self.name}" if self.name else ""
        place += f" (stage {self.stage})" if self.stage is not None else ""
        more = f"; so do {self.others} more" if self.others else ""
        sentences = _SENTENCES.get((self.comparison, self.kind), (_STEP,))
        why = self.hint or "\n      ".join(["May be explained by the contract:", *sentences])
        return f"update {self.update}, {self.kind}{place}: {_both(self.kind, self.values)}{more}\n    {why}"


@dataclass(frozen=True)
class Comparison:
    """One way to train, compared with another: ``"pieces"``, ``"delayed"`` or ``"whole"``."""

    name: str
    difference: Difference | None = None
    remark: str = ""  # how equal they are, or why they were not compared


@dataclass(frozen=True)
class CheckReport:
    """Whether a pipeline trains a module as one process does; layers on each stage, losses of the first updates."""

    stages: Sequence[Sequence[str]]
    micro_batches: int
    losses: Sequence[float]
    comparisons: Sequence[Comparison]

    @property
    def differences(self) -> list[Difference]:
        """Of all comparisons."""
        return [found.difference for found in self.comparisons if found.difference is not None]

    @property
    def ok(self) -> bool:
        """Whether nothing differs, and losses are finite."""
        return not self.differences and all(map(math.isfinite, self.losses))

    @property
    def bitwise(self) -> bool:
        """Whether the pipeline trains to the last bit what the whole model does with its microbatches."""
        return all(difference.comparison == "whole" for difference in self.differences)

    def __str__(self) -> str:
        lines = [f"stage {number}: {', '.join(names)}" for number, names in enumerate(self.stages)]
        lines.append(f"{len(self.losses)} updates, loss {self.losses[0]:.6g} -> {self.losses[-1]:.6g}")
        for found in self.comparisons:
            meaning = _MEANINGS[found.name].format(None, len(self.stages), self.micro_batches)
            verdict = f"DIFFERS in {found.difference}" if found.difference else found.remark
            lines.append(f"{found.name} ({meaning}):\n    {verdict}")
        return "\n".join(lines)


def _both(kind: str, values: tuple[Any, Any]) -> str:
    expected, found = (f"{value:.9g}" if isinstance(value, float) else str(value) for value in values)
    norm = "a norm of " if kind in ("gradient used", "weights", "value at the end") else ""
    if expected == found:
        return f"{norm}{expected} on both sides, and other elements"
    return f"{norm}{expected} is right, {found} was found"

"""What a check found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PAGE = "https://lightning-asyncpp.github.io/lightning-asyncpp/start/your-model/#what-a-module-must-keep-to"
_STEP = "optimization: every parameter is treated separately, by its own gradient and options, once per update"
_CALL = "a step: what layers need comes through arguments, not attributes, closures or contexts around the call"
_HOOKS = "hooks: only the optimizer changes weights, and strategy.drain() or after_own_update comes before reading"
_LOSS = "the loss: a mean over samples, or over what micro_batch_weight counts; none that needs the whole batch at once"
_BATCH = "a batch: its first dimension is that of the samples, or split_batch cuts it"
# Of the page, what may explain a difference.
_RULES = {
    "pieces": (_CALL, _STEP, _HOOKS),
    "delayed": (_HOOKS, _CALL),
    "whole": (_LOSS, _BATCH),
}
_MEANINGS = {
    "pieces": "cutting the model, a pipeline without delay against the whole, in the same microbatches",
    "delayed": "the delay, a pipeline against the rule on the whole model",
    "whole": "cutting batches, whole against in microbatches",
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
        why = self.hint or "\n      ".join([f"May be explained by {_PAGE}:", *_RULES[self.comparison]])
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
    accumulated: int = 1  # batches per update that were asked for

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
        of = f" (accumulate_grad_batches={self.accumulated} is left out)" if self.accumulated != 1 else ""
        cut = f"{len(self.losses)} updates of one batch each{of}, in {self.micro_batches} microbatches"
        lines.append(f"{cut}, loss {self.losses[0]:.6g} -> {self.losses[-1]:.6g}")
        for found in self.comparisons:
            verdict = f"DIFFERS in {found.difference}" if found.difference else found.remark
            lines.append(f"{found.name} ({_MEANINGS[found.name]}):\n    {verdict}")
        return "\n".join(lines)


def _both(kind: str, values: tuple[Any, Any]) -> str:
    expected, found = (f"{value:.9g}" if isinstance(value, float) else str(value) for value in values)
    norm = "a norm of " if kind in ("gradient used", "weights", "value at the end") else ""
    if expected == found:
        return f"{norm}{expected} on both sides, and other elements"
    return f"{norm}{expected} is right, {found} was found"

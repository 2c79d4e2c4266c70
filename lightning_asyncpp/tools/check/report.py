"""What a check found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_PAGE = "https://lightning-asyncpp.github.io/lightning-asyncpp/concepts/contract/"
_SENTENCES = {
    3: "By arguments", 4: "Once, in order", 5: "Weights in layers", 6: "What a step keeps", 7: "Random numbers",
    8: "A mean over samples", 9: "Samples first", 11: "Each parameter by itself", 12: "Of its own batch",
    13: "The optimizer changes weights", 14: "One update behind", 15: "After its own update",
}  # fmt: skip
# Of these, what may explain a difference that a comparison finds; of a kind, or of any other.
_WHY: dict[str, dict[str, tuple[int, ...]]] = {
    "pieces": {"loss": (3, 6, 7), "gradient": (5, 3, 11, 13, 14), "gradient used": (6, 11, 7), "": (11, 13, 6)},
    "delayed": {"gradient used": (12, 14), "weights": (13, 12), "value at the end": (15, 14), "": (14, 4, 12)},
    "whole": {"": (8, 9)},
}
EQUAL = "equal to the last bit"
EQUAL_BUT_FOR_ORDER = "equal but for the order of sums: forward uses one value on several stages"
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
    attributes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)  # of the module, that differ as well

    def __str__(self) -> str:
        place = f" of {self.name}" if self.name else ""
        place += f" (stage {self.stage})" if self.stage is not None else ""
        more = f"; so do {self.others} more" if self.others else ""
        lines = [f"update {self.update}, {self.kind}{place}: {_both(self.kind, self.values)}{more}"]
        for name, values in self.attributes.items():
            lines.append(f"then self.{name} of the module differs, too: {_both('', values)}")
        lines += [self.hint] if self.hint else []
        return "\n    ".join([*lines, f"May be explained by {_PAGE}, sentence {self._sentences()}."])

    def _sentences(self) -> str:
        of_comparison = _WHY[self.comparison]
        numbers = of_comparison.get(self.kind, of_comparison[""])
        return " or ".join(f"{number} ({_SENTENCES[number]})" for number in numbers)


@dataclass(frozen=True)
class CheckReport:
    """Whether a pipeline trains a module as one process does; layers on each stage, losses of the first updates."""

    stages: Sequence[Sequence[str]]
    micro_batches: int
    losses: Sequence[float]
    comparisons: Mapping[str, Difference | str]  # by "pieces", "delayed", "whole": what differs, or how equal they are
    accumulated: int = 1  # batches per update

    @property
    def differences(self) -> list[Difference]:
        """Of all comparisons."""
        return [found for found in self.comparisons.values() if isinstance(found, Difference)]

    @property
    def ok(self) -> bool:
        """Whether nothing differs, and losses are finite."""
        return not self.differences and all(map(math.isfinite, self.losses))

    @property
    def bitwise(self) -> bool:
        """Whether the pipeline trains to the last bit what the whole model does with its microbatches."""
        return all(found == EQUAL for name, found in self.comparisons.items() if name != "whole")

    def __str__(self) -> str:
        lines = [f"stage {number}: {', '.join(names)}" for number, names in enumerate(self.stages)]
        of = f" ({self.accumulated} per update)" if self.accumulated != 1 else ""
        cut = f"{len(self.losses)} batches{of} in {self.micro_batches} microbatches each"
        lines.append(f"{cut}, loss {self.losses[0]:.6g} -> {self.losses[-1]:.6g}")
        for name, found in self.comparisons.items():
            lines.append(f"{name} ({_MEANINGS[name]}):\n    {'DIFFERS in ' * isinstance(found, Difference)}{found}")
        return "\n".join(lines)


def _both(kind: str, values: tuple[Any, Any]) -> str:
    expected, found = (f"{value:.9g}" if isinstance(value, float) else str(value) for value in values)
    norm = "a norm of " if kind in ("gradient", "gradient used", "weights", "value at the end") else ""
    if expected == found:
        return f"{norm}{expected} on both sides, and other elements"
    return f"{norm}{expected} is right, {found} was found"

"""What a check found: where a model is cut, what crosses the cuts, and how near the result is to one process's."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_asyncpp.core.wire.header import TensorInfo
from lightning_asyncpp.errors import ConfigurationError

_EQUAL = "all weights and buffers equal those of a single process to the last bit, which ran the same micro-batches"
_WHERE_FIRST = (
    "It is so before any update: look at this batch (NaN in its inputs; labels that are all -100, a mean over no target"
    " is 0 / 0), at the initial weights, and at logarithms, roots and divisions in the step;"
    " torch.autograd.set_detect_anomaly(True) names the operation"
)
_WHERE_LATER = (
    "The mini-batches before it have finite ones: look at this batch (NaN in its inputs; labels that are all -100, a"
    " mean over no target is 0 / 0), and at whether the training diverges: give check_model an optimizer with a lower"
    " learning rate, for its own is SGD with 0.01"
)


class Comparison(NamedTuple):
    """A batch as a whole, and as the weighted mean over its micro-batches.

    Attributes:
        whole, pieces: the losses.
        loss: how far they are apart, as a share of the largest loss.
        gradient: how far the gradients are apart, as a share of the largest gradient's norm.
    """

    whole: float
    pieces: float
    loss: float
    gradient: float


@dataclass(frozen=True)
class WholeBatches:
    """What comparing whole batches with their micro-batches found.

    Attributes:
        comparisons: of every batch; empty where none could be compared.
        how: what was switched off for it, as text; mostly nothing.
        finding: what a pipeline trains otherwise, with the mend; empty if nothing.
        note: what there is to know beside it.
        left_out: why none could be compared; empty if some were.
    """

    comparisons: Sequence[Comparison] = ()
    how: str = ""
    finding: str = ""
    note: str = ""
    left_out: str = ""


@dataclass(frozen=True)
class CheckReport:
    """A model that a pipeline trains as a single process does.

    Attributes:
        layers_compared: how the model's layers were compared with its forward, as text.
        stages: names of the layers on each stage, the first stage first.
        crossings: what the first micro-batch sent over each cut.
        losses: mean loss of every mini-batch.
        differences: name of a parameter or buffer -> its largest difference from that of a single process, as a share
            of the largest change that training made in it; those that are equal to the last bit are left out.
        whole_batches: how whole batches compare with their micro-batches.
        notes: what there is to know beside it.
        beyond_noise: as ``differences``, without elements whose gradient is nothing but rounding, such as the bias of
            an attention's keys: optimizers that divide by it make whole steps of that.
        without_weight: indices of mini-batches whose micro-batches all have a weight of 0: they have no loss.
        optimizer_left_out: why the module's own optimizer was not looked at; empty if it was, or there is none.
    """

    layers_compared: str
    stages: Sequence[Sequence[str]]
    crossings: Sequence[Sequence[TensorInfo]]
    losses: Sequence[float]
    differences: dict[str, float]
    whole_batches: WholeBatches = field(default_factory=WholeBatches)
    notes: Sequence[str] = ()
    beyond_noise: Mapping[str, float] | None = None
    without_weight: Collection[int] = ()
    optimizer_left_out: str = ""

    @property
    def bitwise(self) -> bool:
        """Whether all weights and buffers equal, to the last bit, those of a single process with the micro-batches."""
        return not self.differences

    @property
    def _judged(self) -> Mapping[str, float]:
        return self.differences if self.beyond_noise is None else self.beyond_noise

    @property
    def findings(self) -> list[str]:
        """What a pipeline trains otherwise than a single process without micro-batches does, each with the mend."""
        return [finding for finding in (self._not_finite(), self.whole_batches.finding) if finding]

    def _not_finite(self) -> str:
        """What to tell of losses that are NaN or infinite: those of both sides are, which says nothing."""
        losses = [(t, loss) for t, loss in enumerate(self.losses) if t not in self.without_weight]
        wrong = [(t, loss) for t, loss in losses if not math.isfinite(loss)]
        if not wrong:
            return ""
        first, loss = wrong[0]
        return (
            f"the loss is not finite: {loss} in mini-batch {first}, the first of {len(wrong)} among {len(losses)}. That"
            " a single process has the same then says nothing of the pipeline."
            f" {_WHERE_LATER if first else _WHERE_FIRST}"
        )

    @property
    def left_out(self) -> list[str]:
        """Comparisons that were not made, each with the reason: what they would have found is not known."""
        why = self.whole_batches.left_out
        left_out = [f"whole batches were not compared with their micro-batches: {why}"] if why else []
        if self.optimizer_left_out:
            left_out.append(f"the module's optimizer was not looked at: {self.optimizer_left_out}")
        return left_out

    @property
    def ok(self) -> bool:
        """Whether everything was compared, and nothing is to be mended."""
        return not self.findings and not self.left_out

    def judge(self, expected_losses: Sequence[float], tolerance: float) -> None:
        """Raise ConfigurationError where a difference is more than rounding.

        Args:
            expected_losses: mean loss of every mini-batch in a single process.
            tolerance: largest difference that is rounding.
        """
        wrong = {name: share for name, share in self._judged.items() if not share <= tolerance}
        if not wrong:
            return
        pairs = enumerate(zip(self.losses, expected_losses))
        first = next((t for t, (a, b) in pairs if not abs(a - b) <= 1e-4 * abs(b)), None)
        since = "all losses agree" if first is None else f"the first loss to differ is that of mini-batch {first}"
        names = ", ".join(sorted(wrong, key=lambda name: -wrong[name])[:5])
        raise ConfigurationError(
            f"the pipeline trained to something else than a single process: {len(wrong)} weights and buffers differ, by"
            f" up to {max(wrong.values()):.1e} of their largest change ({names}); {since}. Likely causes: a step that"
            " keeps something from one call to the next, sums up what layers keep in attributes, or draws random"
            " numbers that are not torch's; a backward hook that reads what the layer's forward left in an attribute"
            " (keep a queue); a function that"
            " pipeline_layers() pairs with a layer, and that draws random numbers before it calls the layer\n\n"
            + "\n".join(self._cuts())
        )

    def __str__(self) -> str:
        updates = f"{len(self.losses)} updates, loss {self.losses[0]:.6g} -> {self.losses[-1]:.6g}"
        notes = [f"note: {note}" for note in (*self.notes, self.whole_batches.note) if note]
        last = [f"FINDING: {finding}" for finding in self.findings]
        last += [f"NOT COMPARED: {left_out}" for left_out in self.left_out]
        made = [f"layers: {self.layers_compared}", f"{updates}: {self._verdict()}", *self._of_whole_batches()]
        return "\n".join([*self._cuts(), *made, *notes, *last])

    def _of_whole_batches(self) -> list[str]:
        found = self.whole_batches
        if not found.comparisons or found.finding:
            return []
        worst = max(found.comparisons, key=lambda compared: compared.loss)
        gradient = max(compared.gradient for compared in found.comparisons)
        how = f" ({found.how})" if found.how else ""
        return [
            f"whole batches{how}: loss {worst.whole:.6g}, in micro-batches {worst.pieces:.6g}; over"
            f" {len(found.comparisons)} batches losses differ by at most {worst.loss:.1e}, gradients by {gradient:.1e}"
        ]

    def _cuts(self) -> list[str]:
        lines = []
        for stage, names in enumerate(self.stages):
            lines.append(f"stage {stage}: {_shortened(names)}")
            lines += [f"  | {_described(tensors)}" for tensors in self.crossings[stage : stage + 1]]
        return lines

    def _verdict(self) -> str:
        if self.bitwise:
            return _EQUAL
        if not self._judged:
            names = ", ".join(list(self.differences)[:5])
            return f"{_EQUAL}, but for elements with a gradient of nothing but rounding ({names})"
        worst = max(self._judged, key=lambda name: self._judged[name])
        return (
            "weights and buffers equal those of a single process, which ran the same micro-batches, to rounding; "
            f"{worst} differs most, by {self._judged[worst]:.1e} of its largest change"
            f"{self._noisy()}"
        )

    def _noisy(self) -> str:
        names = ", ".join([name for name, share in self.differences.items() if share > self._judged.get(name, 0.0)][:5])
        return f"; left out: elements with a gradient of nothing but rounding in {names}" if names else ""


def is_loud(largest: Tensor, expected: Tensor, scale: float) -> Tensor:
    """Which elements of a parameter count: those whose gradient is 0 or more than rounding.

    Args:
        largest: the largest absolute gradient of each element, in the pipeline.
        expected: the same in a single process.
        scale: the largest gradient of all.
    """
    noise = scale * torch.finfo(expected.dtype).eps ** 0.75  # three quarters of the dtype's digits
    either = torch.maximum(largest, expected.to(largest.device))
    loud: Tensor = (either == 0) | ~(either <= noise)
    return loud


def difference_in_change(actual: Tensor, expected: Tensor, initial: Tensor) -> float:
    """Largest difference as a share of the largest change; 0.0 only if they are equal to the last bit."""
    if torch.equal(actual, expected):
        return 0.0
    a, b, start = (tensor.detach().to(torch.float64) for tensor in (actual, expected, initial))
    if torch.equal(a.isnan(), b.isnan()):
        a, b = a.nan_to_num(), b.nan_to_num()
    return float((a - b).abs().max()) / max(float((b - start).abs().max()), 1e-30)


def _shortened(names: Sequence[str]) -> str:
    shown = names if len(names) <= 6 else [*names[:3], f"... {len(names) - 4} more ...", names[-1]]
    return ", ".join(shown)


def _described(tensors: Sequence[TensorInfo]) -> str:
    entries = [
        f"{tuple(info.shape)} {str(info.dtype).removeprefix('torch.')}{'' if info.needs_gradient else ', no gradient'}"
        for info in tensors
    ]
    return f"{'; '.join(entries)}: {sum(info.num_bytes for info in tensors):,} bytes forward per micro-batch"

"""What a check found: where a model is cut, what crosses the cuts, and how near the result is to one process's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.header import TensorInfo


@dataclass(frozen=True)
class CheckReport:
    """A model that a pipeline trains as a single process does.

    Attributes:
        stages: names of the layers on each stage, the first stage first.
        crossings: what the first micro-batch sent over each cut.
        losses: mean loss of every mini-batch.
        differences: name of a parameter or buffer -> its largest difference from that of a single process, as a share
            of the largest change that training made in it; those that are equal to the last bit are left out.
    """

    stages: Sequence[Sequence[str]]
    crossings: Sequence[Sequence[TensorInfo]]
    losses: Sequence[float]
    differences: dict[str, float]

    @property
    def bitwise(self) -> bool:
        """Whether all weights and buffers equal those of a single process to the last bit."""
        return not self.differences

    def judge(self, expected_losses: Sequence[float], tolerance: float) -> None:
        """Raise ConfigurationError where a difference is more than rounding.

        Args:
            expected_losses: mean loss of every mini-batch in a single process.
            tolerance: largest difference that is rounding.
        """
        wrong = {name: share for name, share in self.differences.items() if not share <= tolerance}
        if not wrong:
            return
        pairs = enumerate(zip(self.losses, expected_losses))
        first = next((t for t, (a, b) in pairs if not abs(a - b) <= 1e-4 * abs(b)), None)
        since = "all losses agree" if first is None else f"the first loss to differ is that of mini-batch {first}"
        names = ", ".join(sorted(wrong, key=lambda name: -wrong[name])[:5])
        raise ConfigurationError(
            f"the pipeline trained to something else than a single process: {len(wrong)} weights and buffers differ, by"
            f" up to {max(wrong.values()):.1e} of their largest change ({names}); {since}. Likely causes: a step that"
            " keeps something from one call to the next, or draws random numbers that are not torch's; a function that"
            " pipeline_layers() pairs with a layer, and that draws random numbers before it calls the layer\n\n"
            + "\n".join(self._cuts())
        )

    def __str__(self) -> str:
        updates = f"{len(self.losses)} updates, loss {self.losses[0]:.6g} -> {self.losses[-1]:.6g}"
        return "\n".join([*self._cuts(), f"{updates}: {self._verdict()}"])

    def _cuts(self) -> list[str]:
        lines = []
        for stage, names in enumerate(self.stages):
            lines.append(f"stage {stage}: {_shortened(names)}")
            lines += [f"  | {_described(tensors)}" for tensors in self.crossings[stage : stage + 1]]
        return lines

    def _verdict(self) -> str:
        if self.bitwise:
            return "all weights and buffers equal those of a single process to the last bit"
        worst = max(self.differences, key=lambda name: self.differences[name])
        return (
            f"weights and buffers equal those of a single process to rounding; {worst} differs most, by"
            f" {self.differences[worst]:.1e} of its largest change"
        )


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

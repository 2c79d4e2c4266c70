"""Is the loss of a batch the mean over its micro-batches? Like gradient accumulation, a pipeline trains on that."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lightning_asyncpp.auxiliary import collecting
from lightning_asyncpp.core.batches.user_hooks import loss_of
from lightning_asyncpp.core.randomness import seeded
from lightning_asyncpp.tools.check.check_report import Comparison, WholeBatches
from lightning_asyncpp.tools.check.fixed_draws import FixedDraws
from lightning_asyncpp.tools.check.trial import Trial
from lightning_asyncpp.tools.check.weights import PossibleWeight, possible_weights

# What still counts as equal: the arithmetic of other shapes rounds otherwise. Three quarters of the digits of a dtype
# for a loss (6e-6 in fp32, 3e-2 in bf16), half of them for a gradient (3e-4, 9e-2), in which terms cancel.
_DIGITS_OF_LOSS, _DIGITS_OF_GRADIENT = 0.75, 0.5

_WHICH_TRAINS = "A pipeline trains on the micro-batches, as gradient accumulation does"
_CAUSES = (
    "Likely causes: (a) a mean over tokens, pixels or nodes of which samples have different numbers (padding, masks,"
    " targets of -100), or over class weights: define micro_batch_weight(micro_batch) on the module, which returns how"
    " many the micro-batch's loss is a mean over; (b) a loss that compares the samples of a batch with each other"
    " (in-batch negatives, a normalisation or ranking over the batch): it sees a micro-batch alone, so enlarge the"
    " batch with as many micro_batches, or train this loss without a pipeline; (c) a sum over the batch:"
    " loss_reduction = 'sum'; (d) a first dimension that is not that of the samples ((time, batch), or a shared tensor"
    " with as many rows by chance): define split_batch(batch, parts); (e) something that the step counts: it counts"
    " micro-batches, where self.global_step counts updates"
)
_STILL_RANDOM = (
    "its loss is another one each time, also in eval mode and with torch's random numbers held constant: the step draws"
    " from other generators (Python's, numpy's) or a permutation, or keeps something from one call to the next. Give"
    " check_model a step without that"
)
_BATCH_NORM = (
    "BatchNorm alone makes the difference: its statistics are those of a micro-batch, as they are those of a device"
    " under DDP. Larger micro-batches come nearer to the batch; GroupNorm needs no statistics"
)


def compare_whole_batches(trial: Trial, batches: Sequence[Any]) -> WholeBatches:
    """Run the step on whole batches and on their micro-batches, all on the weights that training starts from.

    Random numbers cannot be the same for both. Where the step draws any, dropout is switched off, or else all but
    BatchNorm is put into eval mode, or else torch's draws are constants, too. What layers add to the loss (the balance
    of experts) is left out.

    Args:
        trial: what a check trains; its module is in training mode, and not changed.
        batches: to be compared.
    """
    sides = _Sides(trial)
    try:
        how = next((how for how in _MODES if not sides.is_random(batches[0], how)), None)
        if how is None:
            return WholeBatches(left_out=_STILL_RANDOM)
        compared = [sides.compare(batch, how) for batch in batches]
    except Exception as error:  # whatever the user's step raises: a pipeline never gives it a whole batch
        return WholeBatches(left_out=f"with a whole batch the step raised {type(error).__name__}: {error}")
    comparisons = [comparison for comparison in compared if comparison is not None]
    if not comparisons:
        return WholeBatches(left_out="of all batches the loss is NaN or the weight 0")
    found = WholeBatches(comparisons, how)
    wrong = next((index for index, c in enumerate(compared) if c is not None and sides.differs(c)), None)
    if wrong is None:
        return found
    said = _described(wrong, compared[wrong], trial.settings.micro_batches)
    if not _differs_without_batch_norm(sides, batches[wrong], how):
        return WholeBatches(comparisons, how, note=f"{said}. {_BATCH_NORM}")
    mend = sides.explained(batches, how) or _CAUSES
    return WholeBatches(comparisons, how, f"{said}. {_WHICH_TRAINS}. {mend}")


def _described(index: int, compared: Comparison | None, micro_batches: int) -> str:
    assert compared is not None
    losses = f"batch {index}: {compared.whole:.6g}, in {micro_batches} micro-batches: {compared.pieces:.6g}"
    if f"{compared.whole:.6g}" != f"{compared.pieces:.6g}":
        return f"the loss of the whole batch is not the weighted mean of its micro-batches' losses ({losses})"
    return (
        "the gradient of the loss of the whole batch is not the weighted mean of its micro-batches' gradients"
        f" (they differ by {compared.gradient:.1e} of its norm; losses of {losses})"
    )


# -- modes --------------------------------------------------------------------------------------------------------


def _without_dropout(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, _DropoutNd):
            layer.eval()


def _all_but_batch_norm(module: nn.Module) -> None:
    module.eval()
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.train()


def _batch_norm(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()


_CONSTANT = "in eval mode but for BatchNorm, the step's random numbers held constant"
# what is said of it -> what it does to a module
_MODES: Mapping[str, Callable[[nn.Module], None]] = {
    "": lambda module: None,
    "dropout off": _without_dropout,
    "in eval mode but for BatchNorm": _all_but_batch_norm,
    _CONSTANT: _all_but_batch_norm,
}


def _differs_without_batch_norm(sides: _Sides, batch: Any, how: str) -> bool:
    if not any(isinstance(layer, _BatchNorm) for layer in sides.trial.module.modules()):
        return True
    compared = sides.compare(batch, how, _batch_norm)
    return compared is not None and sides.differs(compared)


# -- both sides ---------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A loss, its weight, and its gradient."""

    loss: Tensor
    weight: float
    gradient: list[Tensor | None]


def _reweighed(parts: Sequence[_Part], pieces: Sequence[Any], weight: PossibleWeight) -> list[_Part]:
    """The parts of micro-batches that count under another weight."""
    weights = [weight.weigh(piece) for piece in pieces]
    return [part._replace(weight=w) for part, w in zip(parts, weights) if w]


@dataclass
class _Sides:
    """Runs whole batches and micro-batches on copies of the module."""

    trial: Trial
    eps: float = 0.0

    def is_random(self, batch: Any, how: str) -> bool:
        """Whether two runs of a batch under generators with different seeds have different losses."""
        first, second = (
            float(self._whole(batch, how, seed=seed).loss) for seed in (self.trial.seed, self.trial.seed + 1)
        )
        return _apart(first, second, abs(first)) > self._share(_DIGITS_OF_LOSS)

    def compare(
        self, batch: Any, how: str, further: Callable[[nn.Module], None] = lambda module: None
    ) -> Comparison | None:
        """How a batch and its micro-batches differ; None where nothing of it counts, or its loss is NaN anyway."""
        return self._compared(self._whole(batch, how, further), self._parts(batch, how, further))

    def _compared(self, whole: _Part, parts: Sequence[_Part]) -> Comparison | None:
        total = math.fsum(part.weight for part in parts)
        if not total:
            return None
        whole_loss = float(whole.loss) / (total if self._sums else 1.0)
        losses = [float(p.loss) / (p.weight if self._sums else 1.0) for p in parts]
        mean = math.fsum(loss * p.weight for loss, p in zip(losses, parts)) / total
        if math.isnan(whole_loss) and math.isnan(mean):
            return None
        scale = max(map(abs, (whole_loss, *losses)))
        shares = [(1.0 if self._sums else p.weight) / total for p in parts]
        gradients = [_scaled(p.gradient, share) for p, share in zip(parts, shares)]
        of_whole = _scaled(whole.gradient, 1.0 / total if self._sums else 1.0)
        largest = max(_norm(of_whole), math.fsum(map(_norm, gradients)))
        difference = _norm(_minus(of_whole, gradients))
        return Comparison(whole_loss, mean, _apart(whole_loss, mean, scale), _apart(difference, 0.0, largest))

    def differs(self, compared: Comparison) -> bool:
        """Whether it is more than rounding."""
        return not (
            compared.loss <= self._share(_DIGITS_OF_LOSS) and compared.gradient <= self._share(_DIGITS_OF_GRADIENT)
        )

    def explained(self, batches: Sequence[Any], how: str) -> str:
        """The weights with which losses and gradients of all batches agree, if something in the batches counts them."""
        left, verified = [] if self._sums else possible_weights(batches[0]), set()
        for batch in batches if left else ():
            whole, pieces = self._whole(batch, how, _batch_norm), self._pieces(batch)
            parts = self._unweighted(pieces, how)
            known = {weight.text for weight in possible_weights(pieces[0])}
            compared = {weight: self._compared(whole, _reweighed(parts, pieces, weight))
                        for weight in left if weight.text in known}  # fmt: skip
            verified |= {weight for weight, found in compared.items() if found is not None}
            left = [weight for weight, found in compared.items() if found is None or not self.differs(found)]
        text = next((weight.text for weight in left if weight in verified), "")
        return (
            f"Weighted by {text} they agree: define micro_batch_weight on the module, `def"
            f" micro_batch_weight(self, micro_batch): return float({text})`"
            if text else ""
        )  # fmt: skip

    def _pieces(self, batch: Any) -> list[Any]:
        return self.trial.pieces(copy.deepcopy(self.trial.module), copy.deepcopy(batch))

    def _unweighted(self, pieces: Sequence[Any], how: str) -> list[_Part]:
        module = copy.deepcopy(self.trial.module)
        _batch_norm(module)
        return self._run(module, pieces, how, weigh=False)

    @property
    def _sums(self) -> bool:
        return self.trial.hooks(self.trial.module).loss_reduction == "sum"

    def _share(self, digits: float) -> float:
        """What is rounding, as a share; of the coarsest dtype among parameters and losses."""
        dtypes = {p.dtype for p in self.trial.module.parameters() if p.is_floating_point()}
        return float(max([self.eps, *(torch.finfo(dtype).eps for dtype in dtypes)]) ** digits)

    def _whole(
        self, batch: Any, how: str, further: Callable[[nn.Module], None] = lambda module: None, seed: int | None = None
    ) -> _Part:
        module = copy.deepcopy(self.trial.module)
        further(module)
        return self._run(module, [batch], how, weigh=False, seed=seed)[0]

    def _parts(self, batch: Any, how: str, further: Callable[[nn.Module], None]) -> list[_Part]:
        module = copy.deepcopy(self.trial.module)
        further(module)
        return self._run(module, self.trial.pieces(module, copy.deepcopy(batch)), how)

    def _run(
        self, module: nn.Module, batches: Sequence[Any], how: str, weigh: bool = True, seed: int | None = None
    ) -> list[_Part]:
        batch_norm = {layer for layer in module.modules() if isinstance(layer, _BatchNorm) and not layer.training}
        _MODES[how](module)
        for layer in batch_norm:
            layer.eval()
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        parts = []
        draws = FixedDraws() if how == _CONSTANT else nullcontext()
        with _all_seeded(self.trial.seed if seed is None else seed, self.trial.device), draws:
            for batch in batches:
                weight = float(self.trial.hooks(module).micro_batch_weight(batch)) if weigh else 1.0
                if weight:
                    with collecting():
                        loss = loss_of(self.trial.step(module, copy.deepcopy(batch)))
                    gradient = torch.autograd.grad(loss, parameters, allow_unused=True)
                    self.eps = max(self.eps, torch.finfo(loss.dtype).eps)
                    parts.append(_Part(loss.detach(), weight, list(gradient)))
        return parts


@contextmanager
def _all_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators, numpy's and Python's, and put their states back afterwards."""
    python, arrays = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with seeded(seed, device):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


# -- numbers ------------------------------------------------------------------------------------------------------


def _apart(a: float, b: float, scale: float) -> float:
    """Difference as a share of a scale; NaN equals NaN."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / scale if scale else math.inf


def _scaled(gradient: Sequence[Tensor | None], factor: float) -> list[Tensor | None]:
    return [None if g is None else (g.to_dense() if g.is_sparse else g).double() * factor for g in gradient]


def _norm(gradient: Sequence[Tensor | None]) -> float:
    return math.sqrt(math.fsum(float(g.square().sum()) for g in gradient if g is not None))


def _minus(gradient: Sequence[Tensor | None], others: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    columns = zip(gradient, *others)
    return [_minus_one(column[0], [g for g in column[1:] if g is not None]) for column in columns]


def _minus_one(gradient: Tensor | None, others: Sequence[Tensor]) -> Tensor | None:
    if not others:
        return gradient
    total = torch.stack(list(others)).sum(0)
    return -total if gradient is None else gradient - total

"""Microbatches: cutting a batch, weighing the pieces, telling two batches apart; the user's step, and what it made.

Stages take apart the one call of the model in the step: arguments on the first stage, the output on the last.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lightning_asyncpp.core.host_copies import Reading
from lightning_asyncpp.core.tree import is_named_tuple, map_leaves, map_tensors, merge_outputs, tensors_of
from lightning_asyncpp.errors import ConfigurationError

T = TypeVar("T")
# The fingerprint looks at this many elements of a tensor per microbatch at most, evenly spread.
_FINGERPRINT_ELEMENTS = 1024


def number_of_samples(batch: Any) -> int:
    """Size of the first dimension of the first tensor that has one.

    Raises:
        ConfigurationError: no tensor of the batch has a first dimension.
    """
    for tensor in _tensors(batch):
        if tensor.ndim > 0:
            return tensor.size(0)
    raise ConfigurationError(
        f"a batch of type {type(batch).__name__} holds no tensor with a batch dimension: the pipeline cannot cut it;"
        " define split_batch(batch, parts) and microbatch_weight(microbatch) on the module"
    )


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Cut a batch into ``parts`` slots: everything in it that has one entry per sample.

    Sizes differ by one sample at most, as ``torch.tensor_split`` cuts; a slot without samples is ``None``. These are
    cut along their first dimension, and keep their type:

    * every tensor that has dimensions; the first one says how many samples there are;
    * numpy arrays with as many rows as there are samples;
    * lists and tuples with as many entries as there are samples, if no tensor lies anywhere inside: the strings that
      ``default_collate`` leaves as they are, or one list, dictionary or object per sample. Of nested ones the outermost
      is cut.

    Other lists and tuples, named tuples, mappings and dataclasses are structure: what lies inside is cut by the same
    rule. Everything else (tensors without dimensions, strings, numbers, objects, arrays of another length) is handed to
    every microbatch as it is. A list that belongs to the whole batch and may have as many entries as there are samples
    is cut too: if it must not be, define ``split_batch`` on the module.

    Raises:
        ConfigurationError: the tensors of the batch have different first dimensions.
    """
    samples = number_of_samples(batch)
    filled = min(parts, samples)
    if isinstance(batch, Tensor):
        return [*batch.tensor_split(filled), *[None] * (parts - filled)] if filled else [None] * parts
    sizes = {tensor.size(0) for tensor in tensors_of(batch) if tensor.ndim > 0}
    if sizes != {samples}:
        raise ConfigurationError(
            f"the tensors of a batch have different first dimensions {sorted(sizes)}: the pipeline cannot tell which of"
            " them are batched; define split_batch(batch, parts) on the module"
        )

    def is_leaf(node: Any) -> bool:
        return _is_list_of(node, samples) and not any(True for _ in tensors_of(node))

    cuts: dict[int, tuple[Any, Sequence[Any]]] = {}  # id of a leaf -> the leaf, so that it lives, and its pieces

    def piece(leaf: Any, slot: int) -> Any:
        if id(leaf) not in cuts:
            cuts[id(leaf)] = leaf, _pieces(leaf, samples, filled)
        return cuts[id(leaf)][1][slot]

    slots = [map_leaves(functools.partial(piece, slot=slot), batch, is_leaf) for slot in range(filled)]
    return slots + [None] * (parts - filled)


def _tensors(batch: Any) -> Sequence[Tensor]:
    return [batch] if isinstance(batch, Tensor) else list(tensors_of(batch))


def _pieces(leaf: Any, samples: int, parts: int) -> Sequence[Any]:
    if isinstance(leaf, Tensor) and leaf.ndim > 0:
        return leaf.tensor_split(parts)
    if isinstance(leaf, (list, tuple)) or _is_array_of(leaf, samples):
        # The first samples % parts pieces hold one sample more: torch.tensor_split's rule.
        size, longer = divmod(samples, parts)
        starts = [part * size + min(part, longer) for part in range(parts + 1)]
        pieces = [leaf[start:end] for start, end in itertools.pairwise(starts)]
        return pieces if isinstance(leaf, np.ndarray) else [type(leaf)(piece) for piece in pieces]
    return [leaf] * parts


def _is_list_of(tree: Any, samples: int) -> bool:
    return isinstance(tree, (list, tuple)) and not is_named_tuple(tree) and len(tree) == samples


def _is_array_of(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.ndim > 0 and len(leaf) == samples


NO_MARK = 0


class Slot(NamedTuple):
    """A microbatch, or the place of one that is missing.

    Attributes:
        content: the microbatch; None for an empty slot, and on stages that see no batches.
        mark: fingerprint that the first and the last stage compare; :data:`NO_MARK` where it was not taken.
        weight: w_k, where it was asked for.
    """

    content: Any = None
    mark: int = NO_MARK
    weight: float = 1.0


def cut_batch(
    batch: Any,
    parts: int,
    split: Callable[[Any, int], list[Any]],
    weigh: Callable[[Any], float] | None = None,
    on_host: Any = None,
) -> list[Slot]:
    """Cut a batch into slots with their marks and weights.

    One mark for the whole batch suffices where it is cut by :func:`split_batch`, which draws no random numbers: hashing
    every microbatch would cost more.

    Args:
        batch: the batch.
        parts: number of slots.
        split: cuts it.
        weigh: microbatch -> its weight, or a tensor with it; None: nobody asks for weights.
        on_host: the batch where reading it waits for nothing; None: it is that itself. A ``split`` of the user's is not
            called for it: it may draw random numbers.

    Raises:
        ConfigurationError: ``split`` returned another number of parts, or a weight is none.
    """
    on_host = batch if on_host is None else on_host
    contents = split(batch, parts)
    if len(contents) != parts:
        raise ConfigurationError(f"split_batch(batch, {parts}) returned {len(contents)} microbatches")
    is_whole = split is split_batch
    readable = split(on_host, parts) if is_whole and on_host is not batch else contents
    if any(tensor.is_cuda for tensor in _tensors(on_host if is_whole else contents)):
        marks = [NO_MARK] * parts  # a mark is not worth a wait for the GPU
    else:
        marks = [fingerprint(on_host, parts)] * parts if is_whole else list(map(fingerprint, contents))
    if weigh is None:
        return list(map(Slot, contents, marks))
    return list(map(Slot, contents, marks, _weights(readable, weigh)))


def _weights(microbatches: Sequence[Any], weigh: Callable[[Any], Any]) -> list[float]:
    """Weights of microbatches, 0 for one that is missing; what lies on a GPU is read all at once."""
    returned: list[Any] = [0.0 if microbatch is None else weigh(microbatch) for microbatch in microbatches]
    places = [place for place, weight in enumerate(returned) if isinstance(weight, Tensor) and weight.numel() == 1]
    if places:
        for place, (weight,) in zip(places, Reading([returned[place] for place in places]).get()):
            returned[place] = weight
    return list(map(checked_weight, returned))


def checked_weight(returned: Any) -> float:
    """Return the result of ``microbatch_weight`` as a number.

    Raises:
        ConfigurationError: it is not a number, or not one that can be a weight.
    """
    is_one = returned.numel() == 1 if isinstance(returned, Tensor) else isinstance(returned, (numbers.Real, np.number))
    if not is_one:
        what = f"a tensor of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else repr(returned)
        raise ConfigurationError(
            f"microbatch_weight(microbatch) returned {what}: return one number, such as how many targets count"
        )
    weight = float(returned)
    if not (math.isfinite(weight) and weight >= 0):
        raise ConfigurationError(f"microbatch_weight(microbatch) returned {weight}: it must be finite, 0 or more")
    return weight


def fingerprint(batch: Any, microbatches: int = 1) -> int:
    """A number of 63 bits that two different batches share with a probability of about 2**-63.

    It hashes up to 1024 evenly spread elements of every tensor for each microbatch, its shape and its dtype.
    """
    digest = hashlib.blake2b(digest_size=8)
    for tensor in _tensors(batch):
        flat = tensor.detach().reshape(-1)
        stride = -(-flat.numel() // (_FINGERPRINT_ELEMENTS * microbatches)) or 1
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(flat[::stride].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1 or 1  # other than NO_MARK


@dataclass(frozen=True)
class BatchOutput:
    """Results of a batch on the last stage.

    Attributes:
        results: what the user's step returned for each microbatch that had samples.
        weights: their weights.
    """

    results: list[Any]
    weights: list[float]

    @property
    def weight(self) -> float:
        """Total weight of the batch."""
        return sum(self.weights)

    @cached_property
    def _losses(self) -> Tensor | None:
        """Losses of the microbatches that have a weight; None without any."""
        losses = [loss_of(result).detach() for result, weight in zip(self.results, self.weights) if weight]
        return torch.stack(losses) if losses else None

    def mean_loss(self, reduction: str = "mean") -> Tensor | None:
        """Weighted mean of the losses, without those that are NaN where others are not; None without samples."""
        losses = self._losses
        if losses is None:
            return None
        missing, device, total = losses.isnan(), losses.device, sum(self.weights)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        weights = torch.tensor([weight for weight in self.weights if weight], dtype=dtype, device="cpu")
        weights = weights.to(device, non_blocking=True)
        if reduction == "mean":
            losses = losses * weights.to(losses.dtype)
        others = losses.masked_fill(missing, 0.0).sum() / (total - (weights * missing).sum()).to(losses.dtype)
        return torch.where(missing.any(), others, losses.sum() / total)  # to ask if any is NaN would wait for a GPU

    def beside_loss(self) -> dict[str, Any]:
        """Return what training steps returned beside their losses, merged over the batch."""
        if not self.results or not isinstance(self.results[0], Mapping):
            return {}
        beside = [{k: v for k, v in r.items() if k != "loss"} for r in self.results if isinstance(r, Mapping)]
        return merge_outputs(map_tensors(Tensor.detach, beside), self.weights) if any(beside) else {}


def loss_of(result: Any) -> Tensor:
    """Return the loss of a training step: the tensor itself, or the entry ``"loss"``.

    Raises:
        ConfigurationError: there is none, or it is not a single number.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss).__name__)
        if isinstance(result, Mapping):
            what = f"a dict with the keys {list(result)}" if "loss" not in result else f"{what} there"
        mend = "" if result is not None else (
            "; to leave a batch out return a loss of 0, such as 0.0 * self.model(...).sum(): weights stay as they are"
            " but for momentum and decay"
        )  # fmt: skip
        raise ConfigurationError(
            f"training_step must return a loss of one element, or a dict with one under 'loss'; got {what}{mend}"
        )
    return loss.reshape(()) if loss.ndim else loss


def or_nan(loss: Tensor | None, device: torch.device) -> Tensor:
    """The mean loss of a batch; NaN for a batch without samples, which has none."""
    return torch.full((), float("nan"), device=device) if loss is None else loss


Step = Callable[[Any, float | None], Any]
"""The user's step, called with a microbatch and its weight; None where it is left at its call of the model."""
_BY_NAME = ("split_batch", "microbatch_weight", "loss_reduction")


def problems_of_reduction(loss_reduction: object) -> list[str]:
    """Return what is wrong with the argument ``loss_reduction``."""
    return [] if loss_reduction in ("mean", "sum") else [f"loss_reduction={loss_reduction!r} must be 'mean' or 'sum'"]


@dataclass(frozen=True)
class UserHooks:
    """Choices of the user's module about batches and losses.

    Attributes:
        split_batch: (batch, parts) -> that many microbatches, ``None`` for an empty slot.
        microbatch_weight: microbatch -> its weight w_k in the mini-batch's mean loss.
        loss_reduction: ``"mean"`` if the step returns the mean over the microbatch's weight, ``"sum"`` if the sum.
        forward_context: entered around every forward, for the precision.
        context_around_step: whether it covers the whole step of the user, or the layers of the model alone.
        model_name: how the user calls the model, for messages.
    """

    split_batch: Callable[[Any, int], list[Any]] = split_batch
    microbatch_weight: Callable[[Any], float] = number_of_samples
    loss_reduction: str = "mean"
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    context_around_step: bool = True
    model_name: str = "self.model"

    @classmethod
    def of(cls, module: object, **others: Any) -> UserHooks:
        """The user's hooks: the module's attributes of those names, else the defaults.

        Args:
            module: may have ``split_batch``, ``microbatch_weight`` and ``loss_reduction``.
            **others: the other attributes.
        """
        own = {name: getattr(module, name) for name in _BY_NAME if hasattr(module, name)}
        return cls(**own, **others)


class ModelCall:
    """The one call of ``self.model(...)`` in the user's step: captured on the first stage, redirected on the last.

    It replaces ``model.forward`` while the step runs.

    Args:
        called: the module that the step calls.
        name: how the user calls it, for messages.
    """

    def __init__(self, called: nn.Module, name: str = "self.model") -> None:
        self.name = name
        # An instance attribute hides the class's forward; hooks of the module still run around it. It is no parameter
        # and no module, so the way around nn.Module's slow __setattr__ is open.
        self._attributes = vars(called)

    def capture(self, step: Callable[[], Any]) -> tuple[tuple, dict[str, Any]]:
        """Run the step up to the call of the model and return the arguments of that call.

        Raises:
            ConfigurationError: the step ended without calling the model.
        """
        try:
            self._run(step, _leave)
        except _Left as left:
            return left.args
        raise ConfigurationError(self._calls(0))

    def redirect(self, step: Callable[[], T], compute: Callable[[tuple, dict[str, Any]], Any]) -> T:
        """Run the whole step with the output of ``compute`` in place of the model's.

        Raises:
            ConfigurationError: the step called the model never or more than once.
        """
        calls = 0

        def replacement(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise ConfigurationError(self._calls(2))
            return compute(args, kwargs)

        result = self._run(step, replacement)
        if calls == 0:
            raise ConfigurationError(self._calls(0))
        return result

    def _run(self, step: Callable[[], T], forward: Callable[..., Any]) -> T:
        own = self._attributes.get("forward")
        self._attributes["forward"] = forward
        try:
            return step()
        finally:
            del self._attributes["forward"]
            if own is not None:
                self._attributes["forward"] = own

    def _calls(self, count: int) -> str:
        times = "without calling" if count == 0 else "after calling twice"
        inside = "its forward()" if self.name == "self" else self.name
        skips = f"; to leave a batch out return a loss of 0, such as 0.0 * {self.name}(...).sum()"
        return (
            f"the step ended {times} {self.name}(...): under a pipeline it must call it exactly once per microbatch,"
            f" because the stages before the last one run only that call; move everything around it into {inside} or"
            f" compute it from its output{'' if count else skips}"
        )


class _Left(BaseException):
    """Carries the arguments of ``self.model(...)`` out of the user's step."""


def _leave(*args: Any, **kwargs: Any) -> Any:
    raise _Left(args, kwargs)

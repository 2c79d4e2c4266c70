"""Microbatches with their weights and fingerprints (hashes), and calls of the user's step with their results.

The user's step calls the model. The first stage captures the arguments of this call. On the last stage the call returns
the pipeline's output.
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
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lightning_asyncpp.core.host_copies import Reading
from lightning_asyncpp.core.tree import is_named_tuple, map_leaves, map_tensors, merge_outputs, tensors_of
from lightning_asyncpp.errors import ConfigurationError

T = TypeVar("T")
# Maximum number of elements, evenly spread, that a fingerprint reads per tensor and microbatch.
_FINGERPRINT_ELEMENTS = 1024


def number_of_samples(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor that has one.

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
    """Cut a batch into ``parts`` microbatches.

    Sizes differ by at most one sample, as with ``torch.tensor_split``; microbatches without samples are ``None``. The
    following are cut along their first dimension and keep their type:

    * tensors with dimensions, of which the first determines the number of samples;
    * numpy arrays with one row per sample;
    * lists and tuples with one entry per sample that contain no tensor at any depth, such as
      ``default_collate``'s list of strings, or a list that has a list, dictionary or object for each sample. If such
      lists are nested, the outermost is cut.

    The same rule applies inside all other lists and tuples, named tuples, mappings and dataclasses. Everything else
    (tensors without dimensions, strings, numbers, objects, arrays of another length) goes to every microbatch
    unchanged. A list for the whole batch that happens to have one entry per sample is cut, too; to prevent this, define
    ``split_batch`` on the module.

    Raises:
        ConfigurationError: no tensor of the batch has dimensions, or the first dimensions differ.
    """
    samples = number_of_samples(batch)
    filled = min(parts, samples)
    if isinstance(batch, Tensor):
        return [*_pieces(batch, samples, filled), *[None] * (parts - filled)] if filled else [None] * parts
    sizes = {tensor.size(0) for tensor in tensors_of(batch) if tensor.ndim > 0}
    if sizes != {samples}:
        raise ConfigurationError(
            f"the tensors of a batch have different first dimensions {sorted(sizes)}: the pipeline cannot tell which of"
            " them are batched; define split_batch(batch, parts) on the module"
        )

    def is_leaf(node: Any) -> bool:
        return _is_list_of(node, samples) and not any(True for _ in tensors_of(node))

    # Id of a leaf -> the leaf (kept alive, so that its id stays unique) and its pieces.
    cuts: dict[int, tuple[Any, Sequence[Any]]] = {}

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
        return list(map(Tensor.clone, leaf.tensor_split(parts)))  # a step may change its microbatch in place
    if isinstance(leaf, (list, tuple)) or _is_array_of(leaf, samples):
        # As in torch.tensor_split, the first samples % parts pieces have one sample more.
        size, longer = divmod(samples, parts)
        starts = [part * size + min(part, longer) for part in range(parts + 1)]
        pieces = [leaf[start:end] for start, end in itertools.pairwise(starts)]
        return pieces if isinstance(leaf, np.ndarray) else [type(leaf)(piece) for piece in pieces]
    return [leaf] * parts


def _is_list_of(tree: Any, samples: int) -> bool:
    return isinstance(tree, (list, tuple)) and not is_named_tuple(tree) and len(tree) == samples


def _is_array_of(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.ndim > 0 and len(leaf) == samples


NO_FINGERPRINT = 0


class Slot(NamedTuple):
    """Place of a microbatch in a batch.

    Attributes:
        content: the microbatch; None for an empty slot, and on stages without batches.
        fingerprint: hash that the first and the last stage compare; :data:`NO_FINGERPRINT` if none was computed.
        weight: weight w_k in the mean loss, on stages that compute it.
    """

    content: Any = None
    fingerprint: int = NO_FINGERPRINT
    weight: float = 1.0


def cut_batch(
    batch: Any,
    parts: int,
    split: Callable[[Any, int], list[Any]],
    weigh: Callable[[Any], float] | None = None,
    on_host: Any = None,
) -> list[Slot]:
    """Cut a batch into slots with their fingerprints and weights.

    If the deterministic :func:`split_batch` cuts the batch, all microbatches share one fingerprint of the whole batch,
    since hashing each of them would cost more.

    Args:
        batch: the batch.
        parts: number of slots.
        split: (batch, number of slots) -> microbatches.
        weigh: microbatch -> its weight as a number or tensor; None: weights are not computed.
        on_host: copy of the batch on the host; default: ``batch``. A user's ``split`` is called only once, on
            ``batch``, since a second call could draw other random numbers.

    Raises:
        ConfigurationError: ``split`` did not return ``parts`` microbatches, or a weight is invalid.
    """
    on_host = batch if on_host is None else on_host
    contents = split(batch, parts)
    if len(contents) != parts:
        raise ConfigurationError(
            f"split_batch(batch, {parts}) returned {len(contents)} microbatches: return {parts}, with None for empty"
            " ones"
        )
    is_whole = split is split_batch
    readable = split(on_host, parts) if is_whole and on_host is not batch else contents
    if any(tensor.is_cuda for tensor in _tensors(on_host if is_whole else contents)):
        fingerprints = [NO_FINGERPRINT] * parts  # waiting for the GPU would cost more than the check is worth
    else:
        fingerprints = [fingerprint(on_host, parts)] * parts if is_whole else list(map(fingerprint, contents))
    if weigh is None:
        return list(map(Slot, contents, fingerprints))
    return list(map(Slot, contents, fingerprints, _weights(readable, weigh)))


def _weights(microbatches: Sequence[Any], weigh: Callable[[Any], Any]) -> list[float]:
    """Return the weights of microbatches, 0 for empty slots; all weights on a GPU are read in one copy."""
    returned: list[Any] = [0.0 if microbatch is None else weigh(microbatch) for microbatch in microbatches]
    places = [place for place, weight in enumerate(returned) if isinstance(weight, Tensor) and weight.numel() == 1]
    if places:
        for place, (weight,) in zip(places, Reading([returned[place] for place in places]).get()):
            returned[place] = weight
    return list(map(checked_weight, returned))


def checked_weight(returned: Any) -> float:
    """Return the result of ``microbatch_weight`` as a float.

    Raises:
        ConfigurationError: the result is not one finite number of at least 0.
    """
    is_one = returned.numel() == 1 if isinstance(returned, Tensor) else isinstance(returned, (numbers.Real, np.number))
    if not is_one:
        what = f"a tensor of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else repr(returned)
        raise ConfigurationError(
            f"microbatch_weight(microbatch) returned {what}: return one number, such as the number of targets"
        )
    weight = float(returned)
    if not (math.isfinite(weight) and weight >= 0):
        raise ConfigurationError(f"microbatch_weight(microbatch) returned {weight}: it must be finite, 0 or more")
    return weight


def fingerprint(batch: Any, microbatches: int = 1) -> int:
    """Return a 63-bit hash of a batch.

    The hash covers the shape and dtype of every tensor, and up to 1024 evenly spread elements of it per microbatch.
    """
    digest = hashlib.blake2b(digest_size=8)
    for tensor in _tensors(batch):
        flat = tensor.detach().reshape(-1)
        stride = -(-flat.numel() // (_FINGERPRINT_ELEMENTS * microbatches)) or 1
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(flat[::stride].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1 or 1  # never NO_FINGERPRINT


@dataclass(frozen=True)
class BatchOutput:
    """Results of a batch on the last stage.

    Attributes:
        results: result of the user's step for each microbatch with samples; in training, only if its weight is not 0.
        weights: weights of these microbatches.
    """

    results: list[Any]
    weights: list[float]

    @property
    def weight(self) -> float:
        """Total weight of the batch."""
        return sum(self.weights)

    def mean_loss(self, reduction: str = "mean") -> Tensor | None:
        """Return the weighted mean of the losses that are not NaN; NaN if all are NaN, None if all weights are 0."""
        of_microbatches = [loss_of(result).detach() for result, weight in zip(self.results, self.weights) if weight]
        if not of_microbatches:
            return None
        losses = torch.stack(of_microbatches)
        missing, device, total = losses.isnan(), losses.device, sum(self.weights)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        weights = torch.tensor([weight for weight in self.weights if weight], dtype=dtype, device="cpu")
        weights = weights.to(device, non_blocking=True)
        if reduction == "mean":
            losses = losses * weights.to(losses.dtype)
        others = losses.masked_fill(missing, 0.0).sum() / (total - (weights * missing).sum()).to(losses.dtype)
        return torch.where(missing.any(), others, losses.sum() / total)  # an `if` would wait for the GPU

    def extras(self) -> dict[str, Any]:
        """Return the entries that training steps returned besides their losses, merged over the batch."""
        if not self.results or not isinstance(self.results[0], Mapping):
            return {}
        extras = [{k: v for k, v in r.items() if k != "loss"} for r in self.results if isinstance(r, Mapping)]
        return merge_outputs(map_tensors(Tensor.detach, extras), self.weights) if any(extras) else {}


def loss_of(result: Any) -> Tensor:
    """Return the loss of a training step: the tensor itself, or the entry ``"loss"``.

    Raises:
        ConfigurationError: the result has no loss, or a loss with more than one element.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss).__name__)
        if isinstance(result, Mapping):
            what = f"a dict with the keys {list(result)}" if "loss" not in result else f"{what} under 'loss'"
        remedy = "" if result is not None else (
            "; to skip a batch, return a loss of 0, such as 0.0 * self.model(...).sum(): then only momentum and"
            " weight decay change weights"
        )  # fmt: skip
        raise ConfigurationError(
            f"training_step must return a loss with one element, or a dict with such a loss under 'loss'; got"
            f" {what}{remedy}"
        )
    return loss.reshape(()) if loss.ndim else loss


def or_nan(loss: Tensor | None, device: torch.device) -> Tensor:
    """Return the mean loss of a batch; NaN if the batch has no samples."""
    return torch.full((), float("nan"), device=device) if loss is None else loss


Step = Callable[[Any, float | None], Any]
"""User's step, called with a microbatch and its weight; the weight is None on the first of several stages."""
_BY_NAME = ("split_batch", "microbatch_weight", "loss_reduction")


def problems_of_reduction(loss_reduction: object) -> list[str]:
    """Return problems of the argument ``loss_reduction``."""
    return [] if loss_reduction in ("mean", "sum") else [f"loss_reduction={loss_reduction!r} must be 'mean' or 'sum'"]


@dataclass(frozen=True)
class UserHooks:
    """Hooks of the user's module for batches and losses.

    Attributes:
        split_batch: (batch, parts) -> list of ``parts`` microbatches, ``None`` for empty slots.
        microbatch_weight: microbatch -> its weight w_k in the mini-batch's mean loss.
        loss_reduction: ``"mean"`` if the step returns a mean over the microbatch, ``"sum"`` if it returns a sum.
        forward_context: context manager around every forward, for the precision.
        context_around_step: whether the context covers the user's whole step; if not, only the model's layers.
        model_name: name of the model in messages.
    """

    split_batch: Callable[[Any, int], list[Any]] = split_batch
    microbatch_weight: Callable[[Any], float] = number_of_samples
    loss_reduction: str = "mean"
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    context_around_step: bool = True
    model_name: str = "self.model"

    @classmethod
    def of(cls, module: object, **others: Any) -> UserHooks:
        """Return the hooks that a module defines, with defaults for the hooks that it does not define.

        Args:
            module: module, which may have ``split_batch``, ``microbatch_weight`` and ``loss_reduction``.
            **others: other attributes of this class.
        """
        own = {name: getattr(module, name) for name in _BY_NAME if hasattr(module, name)}
        return cls(**own, **others)


class ModelCall:
    """Call of ``self.model(...)`` in the user's step: captured on the first stage, redirected on the last.

    ``model.forward`` is replaced while the step runs.

    Args:
        called: module that the step calls.
        name: name of the module in messages.
    """

    def __init__(self, called: nn.Module, name: str = "self.model") -> None:
        self.name = name
        # An instance attribute hides the class's forward, and the module's hooks still run. It is set through vars(),
        # since nn.Module.__setattr__ is slow.
        self._attributes = vars(called)

    def capture(self, step: Callable[[], Any]) -> tuple[tuple, dict[str, Any]]:
        """Run the step until it calls the model, and return the arguments of this call.

        Raises:
            ConfigurationError: the step ended without calling the model.
        """
        try:
            self._run(step, _leave)
        except _Left as left:
            return left.args
        raise ConfigurationError(self._calls(0))

    def redirect(self, step: Callable[[], T], compute: Callable[[tuple, dict[str, Any]], Any]) -> T:
        """Run the whole step, with ``compute`` in place of the model's forward.

        Raises:
            ConfigurationError: the step did not call the model exactly once.
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
        times = f"without calling {self.name}(...)" if count == 0 else f"after calling {self.name}(...) twice"
        inside = "its forward()" if self.name == "self" else self.name
        skips = f"; to skip a batch, return a loss of 0, such as 0.0 * {self.name}(...).sum()"
        return (
            f"the step ended {times}: under a pipeline the step must call the model exactly once per microbatch, since"
            f" earlier stages run only that call; move further computations into {inside}, or compute them from the"
            f" model's output{'' if count else skips}"
        )


class _Left(BaseException):
    """Exception that carries the arguments of ``self.model(...)`` out of the user's step."""


def _leave(*args: Any, **kwargs: Any) -> Any:
    raise _Left(args, kwargs)

"""What a layer leaves behind in an attribute.

For the step, such as a router's loss: the step, on the last stage, has it of that stage's layers alone. For a backward
hook of the layer: other forwards run before the backward, and replace it. Only its user knows whether somebody reads
it, so that it is warned of.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.cut.elsewhere import OtherTensor
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.private_names import required

_MOST_NAMED = 4
_TWICE = "backward through the graph a second time"  # torch's words
_NOTHING = nullcontext()


class KeptTensors:
    """Looks once, around a stage's first micro-batch, for attributes that hold another tensor afterwards: one with a
    gradient, or any where a full backward hook may read it.

    Args:
        root: the module around the model, with this stage's layers; hooks on them may keep something in it.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._looked = False

    def watching(self) -> AbstractContextManager[None]:
        """Around a forward that gradients are wanted of."""
        return _NOTHING if self._looked else self._watching()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self._looked = True
        before = _kept(self._root)  # as the weight that the older weight_norm computes
        before_hooks = _beside_backward_hooks(self._root)
        yield
        changed = [n for n, mark in _beside_backward_hooks(self._root).items() if before_hooks.get(n) != mark]
        if changed:
            warnings.warn(_text_of_hooks(changed), stacklevel=2)
        if new := [name for name in _kept(self._root) if name not in before]:
            warnings.warn(_text(new), stacklevel=2)


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor], root: nn.Module) -> None:
    """Run a micro-batch's backward.

    Args:
        outputs: where it starts.
        gradients: of these.
        root: the module around the model, with this stage's layers.

    Raises:
        ConfigurationError: it came to what an earlier micro-batch left in an attribute.
    """
    try:
        torch.autograd.backward(outputs, gradients)
    except RuntimeError as error:
        kept = _kept(root) if _TWICE in str(error) else {}
        filled = [name for name, value in kept.items() if not isinstance(value, Tensor)]
        if not kept:
            raise
        raise ConfigurationError(_text_of_left_over(filled or list(kept))) from error


def _kept(root: nn.Module) -> dict[str, Any]:
    """The attributes, in the root, that hold a tensor which was computed from one with a gradient, by their names."""
    return {
        f"{path}.{key}" if path else key: value
        for path, module in root.named_modules()
        for key, value in vars(module).items()
        if any(map(_has_gradient, _parts(value)))
    }


def _beside_backward_hooks(root: nn.Module) -> dict[str, list[tuple[int, int]]]:
    """Attributes that hold a tensor, of the modules with a full backward hook and of the root -> which tensors.

    Queues, in lists and the like, are what should be there instead.
    """
    hooked = {
        path: module
        for path, module in root.named_modules()
        if required(module, "_backward_hooks", "find hooks that mix micro-batches")
    }
    return {
        f"{path}.{key}" if path else key: [(id(tensor), tensor._version) for tensor in tensors]
        for path, module in (hooked | {"": root} if hooked else {}).items()
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers") and (tensors := _held(value))
    }


def _held(value: Any) -> list[Tensor]:
    values = list(value.values()) if isinstance(value, Mapping) else [value]
    return [x for x in values if isinstance(x, Tensor) and not isinstance(x, OtherTensor)]


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, OtherTensor) and value.grad_fn is not None


def _parts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, (list, tuple)) else (value,)


def _text_of_hooks(names: list[str]) -> str:
    return (
        f"{_shortened(names)}: changed by a layer's forward, and there is a full backward hook. If the hook reads it,"
        " micro-batches are mixed: between a micro-batch's forward and its backward other forwards run. Keep a queue:"
        " append to a collections.deque in forwards with module.training, and popleft() in the backward hook"
    )


def _text_of_left_over(names: list[str]) -> str:
    return (
        f"{_shortened(names)}: the loss depends on what an earlier micro-batch left there, whose backward is done. A"
        " pipeline runs the layers, not the model's forward(), so that nothing is cleared there that forward() clears;"
        " and it holds what the layers of this stage left, no others. If it is a loss, call"
        " lightning_asyncpp.auxiliary.add_auxiliary_loss(...) in the layer; if not, keep .detach() of it, and clear it"
        " in training_step before the model is called"
    )


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (" and more" if len(names) > _MOST_NAMED else "")


def _text(names: list[str]) -> str:
    return (
        f"{_shortened(names)}: kept, with a gradient, while a layer ran that is not on the last"
        " stage of the pipeline. The step ends on the last stage, where this is not: if the loss needs it, return it"
        " from the layer, or call lightning_asyncpp.auxiliary.add_auxiliary_loss(...) in the layer; if not, keep"
        " .detach() of it"
    )

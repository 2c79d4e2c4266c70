"""What a layer leaves behind for the step, such as a router's loss in an attribute: the step, on the last stage, has it
of that stage's layers alone. Only its user knows whether the loss needs it, so that it is warned of.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from lightning_asyncpp.pipeline.elsewhere import OtherTensor

_MOST_NAMED = 4
_NOTHING = nullcontext()


class KeptTensors:
    """Looks once, around a stage's first micro-batch, for attributes that hold a tensor with a gradient afterwards.

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
        yield
        if new := [name for name in _kept(self._root) if name not in before]:
            warnings.warn(_text(new), stacklevel=2)


def _kept(root: nn.Module) -> dict[str, None]:
    """Names of the attributes, in the root, that hold a tensor which was computed from one with a gradient."""
    return {
        f"{path}.{key}" if path else key: None
        for path, module in root.named_modules()
        for key, value in vars(module).items()
        if any(map(_has_gradient, _parts(value)))
    }


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, OtherTensor) and value.grad_fn is not None


def _parts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, (list, tuple)) else (value,)


def _text(names: list[str]) -> str:
    more = " and more" if len(names) > _MOST_NAMED else ""
    return (
        f"{', '.join(names[:_MOST_NAMED])}{more}: kept, with a gradient, while a layer ran that is not on the last"
        " stage of the pipeline. The step ends on the last stage, where this is not: if the loss needs it, return it"
        " from the layer, or call lightning_asyncpp.auxiliary.add_auxiliary_loss(...) in the layer; if not, keep"
        " .detach() of it"
    )

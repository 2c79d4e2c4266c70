"""What a forward keeps in attributes though it was computed on another stage: whoever reads it is told so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from lightning_asyncpp.adapt.unknown import Unknown
from lightning_asyncpp.core.batches.tree import children_of, leaves_of
from lightning_asyncpp.core.cut.module_as_network import called_by_steps, class_name
from lightning_asyncpp.errors import ConfigurationError

_OPERATORS = ("add", "sub", "mul", "truediv", "pow", "matmul", "radd", "rsub", "rmul", "rtruediv", "rpow", "neg", "abs",
              "getitem", "len", "iter", "bool", "float", "int", "lt", "le", "gt", "ge", "array")  # fmt: skip


class LeftBehind:
    """Stands in an attribute for values that are on another stage: to do anything with it raises.

    Args:
        place: the attribute, as ``Model.hidden``.
        what: the values are computed from, as ``what blocks.3 returned``.
    """

    def __init__(self, place: str, what: str) -> None:
        self._said = (
            f"{place} was kept by forward, but is computed from {what}, on another pipeline stage than the code that"
            " reads it: have forward return it, or add to the loss in a layer (add_auxiliary_loss)"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of those who copy it, or look what it is
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raise where it is given to a function of torch."""
        next(value for value in leaves_of([list(args), kwargs or {}]) if isinstance(value, LeftBehind))._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigurationError(vars(self)["_said"])


for _name in _OPERATORS:
    setattr(LeftBehind, f"__{_name}__", LeftBehind._refuse)


def replace_left_behind(model: nn.Module, names: Sequence[str], unknown: Unknown) -> None:
    """Put such in the attributes that hold stand-ins after a forward.

    Args:
        model: the model.
        names: of its modules whose code may have kept something.
        unknown: knows the stand-ins of this forward.
    """
    for name in names:
        attributes = vars(called_by_steps(model.get_submodule(name)))
        for key, value in attributes.items():
            if key in _OTHERS or not _holds_tensors(value):
                continue
            tensors = [leaf for leaf in leaves_of(value) if type(leaf) is Tensor]
            if what := unknown.source_of(tensors):
                attributes[key] = LeftBehind(f"{name or class_name(model)}.{key}", what)


def _holds_tensors(value: Any) -> bool:
    """Quickly, as it is asked of all attributes after every forward; other classes are what a pipeline puts there."""
    if type(value) in _PLAIN:
        return False
    return type(value) is Tensor or any(map(_holds_tensors, children_of(value)))


# Configurations are dataclasses with many fields, of which transformers looks up each by code of its own.
_OTHERS = frozenset({*vars(nn.Module()), "config", "generation_config"})
_PLAIN = frozenset({type(None), bool, int, float, str})

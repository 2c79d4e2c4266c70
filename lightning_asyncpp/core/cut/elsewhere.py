"""What a stage has in the places of other stages' layers, and second names of parameters that its own layers hold.

A placeholder holds nothing, and says where the real thing is. A second name is one outside of the layers, as
``model.shared`` of a T5 is: while a layer runs it stands for the parameter as that layer uses it, or the last one
before it that holds it, or the first one that does. So gradients are summed in the same order on any number of stages.
Where the last one before it is on another stage, its use is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.cut.hidden import HiddenLayers
from lightning_asyncpp.core.cut.ties import Tie
from lightning_asyncpp.core.cut.units import Unit, use_names
from lightning_asyncpp.core.cut.whole_model import WholeModel
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.private_names import required

_FACTS = (Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.ndim.__get__, Tensor.size, Tensor.dim, Tensor.numel)  # type: ignore[attr-defined]
_COLLECTIONS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
Uses = dict[int, str]
"""Position of a unit on its stage -> what it calls the parameter, in the model."""


class Home(NamedTuple):
    """Where a tensor lives that this stage does not hold.

    Attributes:
        name: of it in the layer that holds it, as in the model.
        stage: that layer's.
        also_later: whether this stage does hold it, but not before a later layer than the one that uses it.
    """

    name: str
    stage: int
    also_later: bool = False

    def refusal(self, second_name: str, what: str = "is another name of") -> str:
        """Why it cannot be used here, with the mend.

        Args:
            second_name: what it was used as.
            what: that has to do with the tensor.
        """
        here = (
            "on this stage only a later layer than the one that uses it" if self.also_later else "this stage does not"
        )
        return (
            f"{second_name} {what} {self.name}, which a layer of pipeline stage {self.stage} holds and {here}"
            ": let the layer that uses it hold it too (an nn.Module with this parameter, or its module,"
            " as an attribute, in pipeline_layers()), as stages may share weights; to read it, gather it with"
            " strategy.full_state_dict()"
        )


class OtherStage(nn.Module):
    """Stands where a module of another stage was: it holds nothing and cannot run.

    Args:
        name: of the module.
        stage: where it is.
        num_stages: of the pipeline.
        whole: what is known of the model before it was cut.
        home: of what it holds, if this is a second name of a layer, or of what a layer holds.

    Attributes:
    """

    def __init__(
        self, name: str, stage: int, num_stages: int, whole: WholeModel | None = None, home: Home | None = None
    ) -> None:
        super().__init__()
        self.name, self.stage, self.num_stages, self.home = name, stage, num_stages, home
        self.whole = whole or WholeModel()

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse to run."""
        raise RuntimeError(self._elsewhere())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            # Not before it has its attributes: a copy is made without them.
            where = f": {self._elsewhere()}" if "num_stages" in vars(self) else ""
            raise AttributeError(f"{error}{where}") from None

    def _elsewhere(self) -> str:
        if self.home is not None:
            return self.home.refusal(self.name, "holds")
        return (
            f"layer {self.name!r} lives on pipeline stage {self.stage}: call the whole model through"
            " self.model(...) in a *_step method, or gather it with strategy.full_state_dict()"
        )

    def extra_repr(self) -> str:
        """Name the layer and where it is."""
        return f"{self.name!r} on stage {self.stage}"


class OtherTensor(Tensor):
    """Stands where a second name of another stage's parameter or buffer was: it has a shape and a dtype, no values.

    Attributes:
        second_name: of it, as in the module that was cut or the one around it.
        home: where the tensor lives.
    """

    second_name: str
    home: Home

    @staticmethod
    def of(shape: Iterable[int], dtype: torch.dtype, name: str, home: Home) -> OtherTensor:
        """One that stands for a tensor of this shape and dtype."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(OtherTensor)
        tensor.second_name, tensor.home = name, home
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse everything but to tell the shape and the dtype."""
        if func in _FACTS:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise ConfigurationError(" and ".join(t.home.refusal(t.second_name) for t in _found_in((args, kwargs or {}))))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OtherTensor.of, (tuple(self.shape), self.dtype, self.second_name, self.home)

    def __deepcopy__(self, memo: Any) -> OtherTensor:
        return OtherTensor.of(self.shape, self.dtype, self.second_name, self.home)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OtherTensor({self.second_name!r}, {self.home.name!r} on stage {self.home.stage})"


def leave_placeholders(
    root: nn.Module,
    kept: Callable[[nn.Module], bool],
    homes: dict[Tensor, Home],
    other: Callable[[str, Home], nn.Module],
    hidden: HiddenLayers,
) -> None:
    """Take what lives on other stages out of where it stands under second names, outside of this stage's layers.

    A module goes as a whole if all that it holds does, but for a list or dictionary, which may be gone through; of
    another one, such parameters and buffers do. Buffers that no ``state_dict`` holds stay: they are what the model was
    built with, on every stage.

    Args:
        root: what is walked through; the layers of other stages are gone from it already.
        kept: whether a module belongs to a layer of this stage.
        homes: tensor of a layer of another stage, which none of this one holds -> where it lives.
        other: (second name, home) -> what stands for a module.
        hidden: keeps what is taken out.
    """
    gone: tuple[str, ...] = ()
    for path, module in list(root.named_modules(remove_duplicate=False)):
        if kept(module) or path.startswith(gone):
            continue
        inside = list(module.modules())
        held = [tensor for m in inside for _, tensor in saved_tensors(m)]
        goes = path and not isinstance(module, _COLLECTIONS) and held and all(tensor in homes for tensor in held)
        if goes and not any(kept(m) or _stands_in(m) for m in inside):
            hidden.hide(root, path, other(path, homes[held[0]]).train(module.training))
            gone += (f"{path}.",)
            continue
        for key, tensor in saved_tensors(module):
            if tensor in homes:
                name = f"{path}.{key}" if path else key
                hidden.hide(root, name, OtherTensor.of(tensor.shape, tensor.dtype, name, homes[tensor]))


def saved_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers that ``module`` itself has in its ``state_dict``, by its own names."""
    buffers = list(module.named_buffers(recurse=False, remove_duplicate=False))
    unsaved = required(module, "_non_persistent_buffers_set", "tell what a state_dict holds") if buffers else ()
    return [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *((name, buffer) for name, buffer in buffers if name not in unsaved),
    ]


def held_here(root: nn.Module) -> Callable[[str], bool]:
    """Whether an entry of the whole model's ``state_dict`` is one that this stage can load.

    Args:
        root: what was cut, or the module around it.
    """
    modules = list(root.named_modules(remove_duplicate=False))
    others = tuple(f"{path}." for path, module in modules if _stands_in(module))
    tensors = {
        f"{path}.{key}" if path else key
        for path, module in modules
        for key, value in vars(module).items()
        if isinstance(value, OtherTensor)
    }
    return lambda name: not name.startswith(others) and name not in tensors


class SecondName(NamedTuple):
    """Where a module outside the units keeps what some of them hold.

    Attributes:
        module: it.
        key: the name there.
        uses: of the tensor.
    """

    module: nn.Module
    key: str
    uses: Uses


def use_in(uses: Uses, position: int) -> str:
    """The use that a second name means while the unit at a position runs."""
    before = [use for at, use in uses.items() if at <= position]
    return before[-1] if before else next(iter(uses.values()))


def home_before(ties: Sequence[Tie], stage: int, name: str) -> Home | None:
    """Where a parameter lives for the layers of a stage that run before the first one there that holds it.

    Args:
        ties: of the whole model.
        stage: this one.
        name: of the parameter on it.

    Returns:
        The last stage before it that holds the parameter, and its name there; None if there is none.
    """
    tie = next((tie for tie in ties if stage in tie.stages and tie.name_on(stage) == name), None)
    before = tie.before(stage) if tie is not None else None
    return None if tie is None or before is None else Home(tie.name_on(before), before, also_later=True)


def uses_of(units: Sequence[Unit]) -> dict[Tensor, Uses]:
    """Parameters and buffers of a stage's units -> where they are used."""
    uses: dict[Tensor, Uses] = {}
    for position, unit, use_of in use_names(units):
        for name, tensor in (*unit.module.named_parameters(), *unit.module.named_buffers()):
            uses.setdefault(tensor, {})[position] = use_of(name)
    return uses


def homes_of(units: Sequence[Unit], stage_of_unit: Sequence[int], own: range) -> dict[Tensor, Home]:
    """Where the parameters and buffers of other stages' units live, the first one that holds them."""
    homes: dict[Tensor, Home] = {}
    for position, (unit, stage) in enumerate(zip(units, stage_of_unit)):
        if position not in own:
            for name, tensor in (*unit.module.named_parameters(), *unit.module.named_buffers()):
                homes.setdefault(tensor, Home(unit.path(name), stage))
    return homes


def second_names(root: nn.Module, units: Sequence[Unit], uses: Mapping[Tensor, Uses]) -> list[SecondName]:
    """Second names outside of the units of a stage.

    Args:
        root: what is looked through.
        units: of the stage.
        uses: of what they hold.
    """
    inside = {module for unit in units for module in unit.module.modules()}
    return [
        SecondName(module, key, uses[tensor])
        for module in root.modules()
        if module not in inside
        for named in (module.named_parameters, module.named_buffers)
        for key, tensor in named(recurse=False, remove_duplicate=False)
        if tensor in uses
    ]


def _stands_in(module: nn.Module) -> bool:
    return isinstance(module, OtherStage)


def _found_in(value: Any) -> list[OtherTensor]:
    if isinstance(value, OtherTensor):
        return [value]
    if isinstance(value, dict):
        return _found_in(list(value.values()))
    return [found for part in value for found in _found_in(part)] if isinstance(value, (list, tuple)) else []

"""Units: the ordered parts of a model between two possible cuts, usually its layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_asyncpp.core.cut.network import called_by_steps, class_name
from lightning_asyncpp.core.cut.own_forward import Members, OwnForwardStage, cut_of
from lightning_asyncpp.dependencies import required
from lightning_asyncpp.errors import ConfigurationError

_ONLY_CODE = "code without weights"


class Unit(NamedTuple):
    """Part of the model between two possible cuts: a submodule, or several parts that belong together.

    Attributes:
        name: name of the submodule in the model, as in ``state_dict``; for several parts, a name for messages.
        module: the submodule; for several parts, a :class:`Members`. The first unit is called with the model's
            arguments, every later unit with the output of the unit before it.
        function: (module, arguments) -> output; default: the module is called.
    """

    name: str
    module: nn.Module
    function: Callable[..., Any] | None = None

    def apply(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Return the output of the unit."""
        return self.module(*args, **kwargs) if self.function is None else self.function(self.module, *args, **kwargs)

    def path(self, name: str) -> str:
        """Return a parameter's or buffer's name in the model, given its name in the unit's module."""
        return ".".join(filter(None, ("" if isinstance(self.module, Members) else self.name, name)))


def apply_layers(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Apply the layers of a model in order, as the stages of a pipeline do.

    The model's ``forward`` may make this call, and must then compute nothing else.

    Args:
        model: ``nn.Sequential`` or module with ``pipeline_layers()``.
        args: arguments of the first layer; every later layer takes the output of the layer before it.
        kwargs: keyword arguments of the first layer.
    """
    if (own := cut_of(model)) is not None:
        return OwnForwardStage(model, own, 0, own.num_units).run(args, kwargs)
    for unit in pipeline_units(model):
        args, kwargs = (unit.apply(args, kwargs),), {}
    return args[0]


@contextmanager
def entering_units(model: nn.Module, entered: Callable[[int], object]) -> Iterator[None]:
    """Make forwards of a whole model call ``entered`` with each unit's number before the unit runs."""
    hooks: list[Any] = []

    def enter(number: int) -> None:  # returns None: a hook's result would replace inputs or outputs
        entered(number)

    if (own := cut_of(model)) is not None:
        hooks.append(called_by_steps(model).register_forward_pre_hook(lambda *_: enter(0)))
        for number in range(1, own.num_units):  # before the unit's block, or after the previous block
            block = model.get_submodule(own.blocks[number if own.by_inputs else number - 1])
            register = block.register_forward_pre_hook if own.by_inputs else block.register_forward_hook
            hooks.append(register(lambda *_, n=number: enter(n)))
    else:
        numbers: dict[nn.Module, list[int]] = {}  # one module may be several units
        for number, unit in enumerate(pipeline_units(model)):
            numbers.setdefault(unit.module, []).append(number)
        for module, in_turn in numbers.items():
            following = itertools.cycle(in_turn).__next__
            hooks.append(module.register_forward_pre_hook(lambda *_, n=following: enter(n())))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def has_layers(model: nn.Module) -> bool:
    """Return whether a model is an ``nn.Sequential`` or has ``pipeline_layers()``."""
    return isinstance(model, nn.Sequential) or callable(getattr(model, "pipeline_layers", None))


def pipeline_units(model: nn.Module) -> list[Unit]:
    """Return the ordered units of an ``nn.Sequential``, or of a module with ``pipeline_layers()``.

    ``pipeline_layers()`` returns submodules. If a submodule's arguments or output do not fit its neighbours, the list
    has a pair (submodule, function) instead: the function takes the submodule and the previous layer's output, and
    calls the submodule.

    Raises:
        ConfigurationError: the model has no such layers, or they are not distinct submodules of the model.
    """
    if (own := cut_of(model)) is not None:
        held = [own.names_of(number) for number in range(own.num_units)]
        blocks = [*own.blocks, ""]
        return [Unit(_name_of(own.around[i], blocks[i]), Members(model, parts)) for i, parts in enumerate(held)]
    layers = getattr(model, "pipeline_layers", None)
    if callable(layers):
        return _named_layers(model, layers)
    if isinstance(model, nn.Sequential):
        names = [name for name, _ in model.named_modules(remove_duplicate=False) if name and "." not in name]
        return [Unit(name, model.get_submodule(name)) for name in names]
    raise ConfigurationError(
        f"the model is a {type(model).__name__}, which the pipeline cannot cut: make it an nn.Sequential, or give it"
        " pipeline_layers(), a method that returns its layers in the order in which they are applied"
    )


def _named_layers(model: nn.Module, layers: Callable[[], Sequence[Any]]) -> list[Unit]:
    name_of = {id(module): name for name, module in model.named_modules()}
    pairs = [layer if isinstance(layer, tuple) and len(layer) == 2 else (layer, None) for layer in layers()]
    problems = []
    if not pairs:
        problems.append("the list is empty")
    if any(not isinstance(module, nn.Module) or not name_of.get(id(module)) for module, _ in pairs):
        problems.append("the list holds something that is not a submodule of the model")
    if len({id(module) for module, _ in pairs}) != len(pairs):
        problems.append("the list holds a layer twice")
    if any(not (function is None or callable(function)) for _, function in pairs):
        problems.append("the second entry of a pair is not a function")
    if problems:
        raise ConfigurationError(
            f"{class_name(model)}.pipeline_layers() must return distinct submodules of the model in order:"
            f" {' and '.join(problems)}"
        )
    return [Unit(name_of[id(module)], module, function) for module, function in pairs]


def _name_of(around: Sequence[str], block: str) -> str:
    """Return a unit's name for messages: the modules besides its block whose tensors it uses, then the block."""
    holders = list(dict.fromkeys(name.rpartition(".")[0] or name for name in around))
    more = [f"{len(holders) - 2} more"] if len(holders) > 2 else []
    return " + ".join([*holders[:2], *more, *filter(None, [block])]) or _ONLY_CODE


def telling(names: Sequence[str]) -> list[str]:
    """Return the names of units for messages; units without weights are left out."""
    return [name for name in names if name != _ONLY_CODE] or list(names)


def use_names(units: Sequence[Unit]) -> Iterator[tuple[int, Unit, Callable[[str], str]]]:
    """Yield position, unit, and a function: name of a tensor in the unit -> name of the unit's use of the tensor.

    The name of a use is the tensor's path in the model; if an earlier unit has the same path, the unit's position is
    added.

    Args:
        units: units of a stage.
    """
    first: dict[str, int] = {}

    def name(at: int, path: str) -> str:
        return path if first.setdefault(path, at) == at else f"{path} in layer {at}"

    for position, unit in enumerate(units):
        yield position, unit, lambda key, at=position, unit=unit: name(at, unit.path(key))  # type: ignore[misc]


def has_parameters(unit: Unit) -> bool:
    """Return whether a unit has parameters."""
    return any(True for _ in unit.module.parameters())


def stages_of_parameters(model: nn.Module, counts: Sequence[int]) -> dict[str, int]:
    """Return name of a parameter of ``model`` -> its stage, with ``counts`` units on each stage.

    Raises:
        ConfigurationError: the model cannot be cut.
    """
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    return {
        unit.path(name): stage
        for unit, stage in zip(pipeline_units(model), stages)
        for name, _ in unit.module.named_parameters()
    }


def ownership_problems(root: nn.Module, units: Sequence[Unit]) -> list[str]:
    """Report trainable parameters outside of all units, which no stage would train; return at most one problem."""
    owned = {id(p) for unit in units for p in unit.module.parameters()}
    outside = [name for name, p in root.named_parameters() if p.requires_grad and id(p) not in owned]
    if not outside:
        return []
    return [
        f"parameters outside the layers of self.model: {', '.join(outside[:8])}"
        f"{' and more' if len(outside) > 8 else ''}; the pipeline trains only parameters in layers: move these into a"
        " layer of self.model, or freeze them (requires_grad=False)"
    ]


def model_problems(model: nn.Module, name: str = "self.model") -> list[str]:
    """Return problems that make a model impossible to cut, whatever its layers are; each with a remedy.

    Args:
        model: model to be cut.
        name: name of the model in messages.
    """
    problems = []
    if is_compiled(model):
        problems.append(
            f"{name} was compiled as a whole (torch.compile), but a stage runs its layers one by one: compile the"
            " layers instead (layer.compile() for every layer, before the strategy sets the model up)"
        )
    lazy = [key for key, parameter in model.named_parameters() if isinstance(parameter, UninitializedParameter)]
    if lazy:
        problems.append(
            f"parameters of lazy layers have no shape yet ({', '.join(lazy[:5])}): run one forward before training,"
            " which sets their shapes"
        )
    return problems


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model was compiled as a whole, by ``torch.compile`` or its method ``compile()``."""
    required(nn.Module, "_compiled_call_impl", "refuse a model compiled as a whole")
    is_wrapped = hasattr(model, "_orig_mod")  # torch.compile's wrapper; the name is also the prefix in its state_dict
    return is_wrapped or model._compiled_call_impl is not None


def meta_problems(root: nn.Module, units: Sequence[Unit]) -> list[str]:
    """Report meta tensors outside of all units, which no stage would initialise; return at most one problem."""
    owned = {id(tensor) for unit in units for tensor in (*unit.module.parameters(), *unit.module.buffers())}
    tensors = [*root.named_parameters(), *root.named_buffers()]
    outside = [name for name, t in tensors if t.is_meta and not t.requires_grad and id(t) not in owned]
    if not outside:
        return []
    return [
        f"meta tensors outside the layers of the model: {', '.join(outside[:8])}; no stage would give them a value:"
        " move them into a layer that has reset_parameters(), or build the model with real weights"
    ]


def collective_problems(units: Sequence[Unit]) -> list[str]:
    """Report layers with collectives over all ranks, as some ranks lack the layer; return at most one problem."""
    synchronised = [
        unit.path(name)
        for unit in units
        for name, module in unit.module.named_modules()
        if isinstance(module, nn.SyncBatchNorm) and module.process_group is None
    ]
    if not synchronised:
        return []
    return [
        f"SyncBatchNorm ({', '.join(synchronised[:4])}) synchronises over all ranks, but most ranks do not have this"
        " layer: use BatchNorm, which takes the statistics of each microbatch, or GroupNorm"
    ]

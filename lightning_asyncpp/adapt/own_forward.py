"""Whether a model's own ``forward`` is what its layers do, which is all that a pipeline runs of it."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_asyncpp.adapt.differences import difference_of
from lightning_asyncpp.adapt.examples import call_of, copied, examples_of
from lightning_asyncpp.adapt.layers import with_switches
from lightning_asyncpp.adapt.pipelined import is_adapted, is_small, looked_at, problems_of_adapting
from lightning_asyncpp.adapt.state import as_before
from lightning_asyncpp.core.cut.module_as_network import called_by_steps, class_name
from lightning_asyncpp.core.cut.parts import KEPT_AS
from lightning_asyncpp.core.cut.units import apply_layers, has_layers, is_placeholder
from lightning_asyncpp.errors import ConfigurationError


def problems_of_layers(model: nn.Module, example: Any = None, name: str = "self.model") -> list[str]:
    """Make a model say where it can be cut, if it does not; what is in the way, or wrong with its layers.

    Arguments: those of :func:`problems_of_forward`; the model is changed in place, unless something is in the way.
    """
    return problems_of_adapting(model, example, name) or problems_of_forward(model, example, name)


def problems_of_forward(model: nn.Module, example: Any = None, name: str = "self.model") -> list[str]:
    """What is wrong with a model whose layers give something else; a warning, on rank 0, where that is not known.

    Args:
        model: whole, before it is cut; it is left as it was.
        example: of its arguments, as :func:`~lightning_asyncpp.pipelined` takes them; without, one is tried where a
            model says enough of itself.
        name: how the user calls the model.
    """
    try:
        remark = _remark(model, example, name)
    except ConfigurationError as error:
        return [str(error)]
    if remark:
        rank_zero_warn(remark)
    return []


def _remark(model: nn.Module, example: Any, name: str) -> str:
    """Of a forward that was not compared with the layers; empty if there is nothing to tell."""
    if not has_layers(model) or _is_known(model) or any(is_placeholder(module) for module in model.modules()):
        return ""
    if _can_run(model):
        for args, kwargs in examples_of(model) if example is None else [call_of(example)]:
            if (outputs := _outputs(model, args, kwargs)) is not None:
                if difference_of(*outputs):
                    raise ConfigurationError(_differs(model, name))
                return ""
    return (
        f"{name} is a {class_name(model)} with a forward of its own. A pipeline does not run that, but its layers"
        " one after the other: whether both give the same was not compared. Let forward be `return"
        " lightning_asyncpp.apply_layers(self, *args, **kwargs)`, run check_model(module, batches) once, or set"
        " example_input_array (in Fabric an argument of the strategy), with which they are compared at every start"
    )


def _differs(model: nn.Module, name: str) -> str:
    return (
        f"{name}: forward of {class_name(model)} gives something else than its layers, applied one after the other,"
        " which is all that a pipeline runs: move what forward does beside calling them into a layer, or into a layer's"
        " function in pipeline_layers() (check_model(module, batches) says by how much they differ)"
    )


def _is_known(model: nn.Module) -> bool:
    """Whether its forward is its layers by how it is made."""
    forward = type(called_by_steps(model)).forward
    forward = getattr(forward, "__wrapped__", forward)
    if is_adapted(model) or forward is nn.Sequential.forward:
        return True
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return "apply_layers" in names or "pipeline_layers" in names


def _can_run(model: nn.Module) -> bool:
    return is_small(model) and all(parameter.device.type == "cpu" for parameter in model.parameters())


def _outputs(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Of forward, and of the layers; None if it cannot be called so, or not twice with the same outcome."""
    kwargs = with_switches(model, kwargs)
    with looked_at(model), as_before(model, (KEPT_AS,)):
        try:
            calls = [copied(args, kwargs) for _ in range(3)]
            first, second = (type(model).forward(model, *args, **kwargs) for args, kwargs in calls[:2])
            in_order = apply_layers(model, *calls[2][0], **calls[2][1])
            return None if difference_of(first, second) else (first, in_order)
        except Exception:  # which the training will raise, if the example is like its batches
            return None

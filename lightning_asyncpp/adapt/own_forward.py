"""Whether a model's own ``forward`` is what its layers do, which is all that a pipeline runs of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_asyncpp.adapt.examples import examples_of
from lightning_asyncpp.adapt.layers import with_switches
from lightning_asyncpp.adapt.pipelined import is_adapted, looked_at
from lightning_asyncpp.adapt.state import as_before
from lightning_asyncpp.pipeline.batches.tree import leaves_of
from lightning_asyncpp.pipeline.cut.parts import KEPT_AS
from lightning_asyncpp.pipeline.cut.units import apply_layers, has_layers, is_placeholder
from lightning_asyncpp.pipeline.errors import ConfigurationError

_LARGE = 50_000_000  # parameters of a model for which one call more is not cheap
_ROUNDING = 1e-3


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
        for args, kwargs in _calls(model, example):
            if (outputs := _outputs(model, args, kwargs)) is not None:
                if not _alike(*outputs):
                    raise ConfigurationError(_differs(model, name))
                return ""
    return (
        f"{name} is a {type(model).__name__} with a forward of its own. A pipeline does not run that, but its layers"
        " one after the other: whether both give the same was not compared. Let forward be `return"
        " lightning_asyncpp.apply_layers(self, *args, **kwargs)`, run check_model(module, batches) once, or set"
        " example_input_array (in Fabric an argument of the strategy), with which they are compared at every start"
    )


def _differs(model: nn.Module, name: str) -> str:
    return (
        f"{name}: forward of {type(model).__name__} gives something else than its layers, applied one after the other,"
        " which is all that a pipeline runs: move what forward does beside calling them into a layer, or into a layer's"
        " function in pipeline_layers() (check_model(module, batches) says by how much they differ)"
    )


def _is_known(model: nn.Module) -> bool:
    """Whether its forward is its layers by how it is made."""
    forward = getattr(type(model).forward, "__wrapped__", type(model).forward)
    if is_adapted(model) or forward is nn.Sequential.forward:
        return True
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return "apply_layers" in names or "pipeline_layers" in names


def _can_run(model: nn.Module) -> bool:
    parameters = list(model.parameters())
    return all(p.device.type == "cpu" for p in parameters) and sum(p.numel() for p in parameters) <= _LARGE


def _calls(model: nn.Module, example: Any) -> Iterator[tuple[tuple, dict[str, Any]]]:
    if example is None:
        yield from examples_of(model)
    elif isinstance(example, Mapping):
        yield (), dict(example)
    else:
        yield tuple(example) if isinstance(example, (tuple, list)) else (example,), {}


def _outputs(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Of forward, and of the layers; None if it cannot be called so, or not twice with the same outcome."""
    kwargs = with_switches(model, kwargs)
    with looked_at(model), as_before(model, (KEPT_AS,)):
        try:
            own = [type(model).forward(model, *args, **kwargs) for _ in range(2)]
            return (own[0], apply_layers(model, *args, **kwargs)) if _alike(*own) else None
        except Exception:  # which the training will raise, if the example is like its batches
            return None


def _alike(first: Any, second: Any) -> bool:
    ours, theirs = list(leaves_of(first)), list(leaves_of(second))
    return len(ours) == len(theirs) and all(map(_same, ours, theirs))


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = float(b.abs().nan_to_num().max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=_ROUNDING, atol=_ROUNDING * scale, equal_nan=True)

"""``pipelined(model)``: lets a pipeline cut a model, whoever wrote it, as it is."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_asyncpp.adapt.analysis import find_cut
from lightning_asyncpp.adapt.blocks import find_blocks
from lightning_asyncpp.adapt.runs import Call, call_of, copied, examples_of, untouched
from lightning_asyncpp.core.cut.network import called_by_steps, class_name
from lightning_asyncpp.core.cut.units import has_layers
from lightning_asyncpp.core.cut.whole_model import whole_of
from lightning_asyncpp.core.randomness import drawing_from
from lightning_asyncpp.core.tree import map_tensors
from lightning_asyncpp.errors import ConfigurationError

Model = TypeVar("Model", bound=nn.Module)
Example = Tensor | Sequence[Any] | Mapping[str, Any]
_LONGEST = 400  # characters of an error that are repeated


def pipelined(model: Model, example: Example | None = None, blocks: str | Sequence[str] = ()) -> Model:
    """Let a pipeline cut a model between the blocks that its forward calls one after the other.

    Each stage runs the model's own forward: blocks of earlier stages return what arrived, and behind the stage's last
    block it ends. What stages need of each other is found with the example, in training and in evaluation mode. Names
    in ``state_dict``, ``from_pretrained``, ``save_pretrained`` and calls outside of a pipeline stay the same.

    Args:
        model: a model with real weights, such as those of ``transformers``, ``timm`` and ``torchvision``.
        example: what it is called with in the training: positional arguments in a tuple, the only one as a tensor, or
            keyword arguments in a dictionary. Models of ``transformers`` and ``timm``, and those that begin with an
            embedding, a linear layer or a convolution, do without, if what else they take is of the same shape or a
            number per sample.
        blocks: name of the ``ModuleList`` or ``Sequential`` of layers, or names of several; default: they are looked
            for.

    Returns:
        The model.

    Raises:
        ConfigurationError: it cannot be cut so, or called with the example, with what is in the way.
    """
    if not has_layers(model) or (blocks and not hasattr(model, "pipeline_layers")):
        _cut_as_it_is(model, example, [blocks] if isinstance(blocks, str) else blocks)
    return model


def _cut_as_it_is(model: nn.Module, example: Example | None = None, blocks: Sequence[str] = ()) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigurationError(
            f"{class_name(model)} is on the meta device, and pipelined() runs it once: build it with real weights"
        )
    if getattr(getattr(model, "config", None), "use_cache", False):
        model.config.use_cache = False  # type: ignore[union-attr]  # which may change what a model computes
        rank_zero_info(f"{class_name(model)}: config.use_cache=False, as a training needs no cache of keys and values")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with drawing_from(0, device), untouched(model), torch.inference_mode(False), torch.enable_grad():
        call = _working_example(model, example, device)
        cut, costs = find_cut(model, call, find_blocks(model, call, blocks))
    model.pipeline_layers = cut  # type: ignore[assignment]
    model.pipeline_costs = functools.partial(list, costs)  # type: ignore[assignment]


def problems_of_layers(
    model: nn.Module, example: Any = None, name: str = "self.model", num_stages: int = 1
) -> list[str]:
    """Let a model be cut as it is, if it does not say where it can be; return what is in the way.

    Args:
        model: it is changed in place, unless something is in the way.
        example: a LightningModule's ``example_input_array``.
        name: how the user calls it.
        num_stages: an ``nn.Sequential`` of fewer layers is cut within them.
    """
    held = [any(True for _ in layer.parameters()) for layer in model] if isinstance(model, nn.Sequential) else []
    few = bool(held) and sum(held) < num_stages and whole_of(model) is None
    if has_layers(model) and not (few and not hasattr(model, "pipeline_layers")):
        return []
    given = example if example is None or isinstance(example, (tuple, Mapping)) else (example,)
    try:
        _cut_as_it_is(model, given)
    except ConfigurationError as error:
        return [f"{name} is a {class_name(model)}, which the pipeline cannot cut by itself: {error}"]
    return []


def _working_example(model: nn.Module, example: Example | None, device: torch.device) -> Call:
    """Arguments that the model takes, on its device."""
    called = called_by_steps(model)
    problem = ""
    for call in examples_of(model) if example is None else [call_of(example)]:
        args, kwargs = (map_tensors(lambda t: _varied(t.to(device)), value) for value in call)
        try:
            given, named = copied(args, kwargs)
            with untouched(model), torch.no_grad():
                type(called).__call__(called, *given, **named)
            return args, kwargs
        except Exception as error:
            problem = textwrap.shorten(f"{type(error).__name__}: {error}", _LONGEST, placeholder=" ...")
    shown = map_tensors(lambda t: f"{t.dtype} {list(t.shape)}", example)
    raise ConfigurationError(
        f"{class_name(model)} cannot be called with {'what is guessed' if example is None else shown}"
        f" ({problem}). Give an example of what the training calls it with, (x, mask) or {{'input_ids': ids}}: in the"
        " LightningModule's example_input_array, in Fabric the strategy's, or in pipelined(model, example); or give the"
        " model pipeline_layers()"
    )


def _varied(tensor: Tensor) -> Tensor:
    """Other numbers in place of zeros, which would hide what depends on them."""
    if not tensor.is_floating_point() or tensor.any():
        return tensor
    return torch.linspace(-0.9, 0.8, tensor.numel(), dtype=tensor.dtype, device=tensor.device).view(tensor.shape)

"""``pipelined(model)``: cut an unmodified model between its blocks."""

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
from lightning_asyncpp.adapt.runs import Call, copied, examples_of, untouched
from lightning_asyncpp.core.cut.network import called_by_steps, class_name
from lightning_asyncpp.core.cut.partition_choice import call_of
from lightning_asyncpp.core.cut.units import has_layers
from lightning_asyncpp.core.cut.whole_model import whole_of
from lightning_asyncpp.core.randomness import drawing_from
from lightning_asyncpp.core.tree import map_tensors
from lightning_asyncpp.errors import ConfigurationError

Model = TypeVar("Model", bound=nn.Module)
Example = Tensor | Sequence[Any] | Mapping[str, Any]
_LONGEST = 400  # maximum number of characters of an error that a message quotes


def pipelined(model: Model, example: Example | None = None, blocks: str | Sequence[str] = ()) -> Model:
    """Prepare a model to be cut between the blocks that its forward calls in order.

    Each stage runs the model's own forward. In it, blocks of earlier stages do not run, and the forward ends
    after the stage's last block. Runs with the example, in training and in evaluation mode, show which values stages
    need from each other. Names in ``state_dict``, ``from_pretrained``, ``save_pretrained`` and calls outside of a
    pipeline stay the same, except that ``config.use_cache`` becomes False.

    Args:
        model: model with real weights, such as those of ``transformers``, ``timm`` and ``torchvision``.
        example: arguments of a call in training: a tensor, a tuple of positional arguments, or a dictionary of keyword
            arguments. Models of ``transformers`` and ``timm`` need no example. Models that begin with an embedding, a
            linear layer or a convolution need none if each further argument has the first argument's shape or one
            number per sample.
        blocks: name of the ``ModuleList`` or ``Sequential`` of layers, or several such names; default: search for them.

    Returns:
        The model; unchanged if it has ``pipeline_layers()``, or is an ``nn.Sequential`` and ``blocks`` is not given.

    Raises:
        ConfigurationError: the model is on the meta device, cannot be called with the example, or cannot be cut.
    """
    if not has_layers(model) or (blocks and not hasattr(model, "pipeline_layers")):
        _add_pipeline_layers(model, example, [blocks] if isinstance(blocks, str) else blocks)
    return model


def _add_pipeline_layers(model: nn.Module, example: Example | None = None, blocks: Sequence[str] = ()) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigurationError(
            f"{class_name(model)} is on the meta device, but pipelined() has to run it: build it with real weights"
        )
    if getattr(getattr(model, "config", None), "use_cache", False):
        model.config.use_cache = False  # type: ignore[union-attr]  # a cache may change what a model computes
        rank_zero_info(
            f"{class_name(model)}: set config.use_cache=False, since training needs no cache of keys and values"
        )
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with drawing_from(0, device), untouched(model), torch.inference_mode(False), torch.enable_grad():
        call = _working_example(model, example, device)
        cut, costs = find_cut(model, call, find_blocks(model, call, blocks))
    model.pipeline_layers = cut  # type: ignore[assignment]
    model.pipeline_costs = functools.partial(list, costs)  # type: ignore[assignment]


def problems_of_layers(
    model: nn.Module, example: Any = None, name: str = "self.model", num_stages: int = 1
) -> list[str]:
    """Prepare a model without ``pipeline_layers()`` to be cut between its blocks, in place; return problems, if any.

    Args:
        model: model to be cut.
        example: ``example_input_array`` of a LightningModule.
        name: name of the model in messages.
        num_stages: number of stages; an ``nn.Sequential`` with parameters in fewer layers is cut inside its layers.
    """
    held = [any(True for _ in layer.parameters()) for layer in model] if isinstance(model, nn.Sequential) else []
    few = bool(held) and sum(held) < num_stages and whole_of(model) is None
    if has_layers(model) and not (few and not hasattr(model, "pipeline_layers")):
        return []
    given = example if example is None or isinstance(example, (tuple, Mapping)) else (example,)
    try:
        _add_pipeline_layers(model, given)
    except ConfigurationError as error:
        return [f"{name} is a {class_name(model)}, which the pipeline cannot cut by itself: {error}"]
    return []


def _working_example(model: nn.Module, example: Example | None, device: torch.device) -> Call:
    """Return arguments on the model's device with which a call succeeds."""
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
        f"{class_name(model)} cannot be called with {'guessed arguments' if example is None else shown} ({problem})."
        " Give an example of its arguments in training, such as (x, mask) or {'input_ids': ids}: set"
        " example_input_array on the LightningModule (in Fabric, on the model), or call pipelined(model, example)."
        " Or give the model pipeline_layers()"
    )


def _varied(tensor: Tensor) -> Tensor:
    """Replace an all-zero floating-point tensor by varied numbers: zeros would hide which results depend on it."""
    if not tensor.is_floating_point() or tensor.any():
        return tensor
    return torch.linspace(-0.9, 0.8, tensor.numel(), dtype=tensor.dtype, device=tensor.device).view(tensor.shape)

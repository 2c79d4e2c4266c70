"""Examples of what models are called with, where they say enough of themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.batches.tree import map_tensors
from lightning_asyncpp.core.cut.module_as_network import called_by_steps

Call = tuple[tuple, dict[str, Any]]
_BATCH, _TIME = 2, 8
_DIMENSIONS: dict[type, int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
_FIRST = (nn.Embedding, nn.Linear, *_DIMENSIONS)
_TOKEN_LABELS = ("CausalLM", "LMHead", "MaskedLM", "ConditionalGeneration")


def call_of(example: Any) -> Call:
    """The arguments that an example stands for: a mapping of keyword ones, positional ones, or the only one."""
    if isinstance(example, Mapping):
        return (), dict(example)
    # A tensor is a sequence as well: of its rows.
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def _positional(model: nn.Module, required: bool = False) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(type(called_by_steps(model)).forward).parameters.values())[1:]
    except ValueError:  # of a function that does not say
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [parameter for parameter in parameters if parameter.kind in kinds]
    return [parameter for parameter in found if parameter.default is parameter.empty] if required else found


def copied(args: tuple, kwargs: Mapping[str, Any]) -> Call:
    """Arguments that the model may change in place."""
    return map_tensors(Tensor.clone, tuple(args)), map_tensors(Tensor.clone, dict(kwargs))


def examples_of(model: nn.Module) -> Iterator[Call]:
    """Calls that may fit, the richest first."""
    if hasattr(model, "config") and hasattr(model, "main_input_name"):
        yield from _of_transformers(model)
        return
    missing = len(_positional(model, required=True)) - 1
    for first in _first_arguments(model):
        if missing < 1:
            yield (first,), {}
            continue
        # Another sequence or image; a class or a moment for each sample.
        for other in (first, torch.randint(2, (_BATCH,)), torch.rand(_BATCH)):
            yield (first, *[other] * missing), {}


def _first_arguments(model: nn.Module) -> Iterator[Tensor]:
    """What the first layer may take: the first of each kind, as submodules come in any order; tokens first."""
    for known in (getattr(model, "pretrained_cfg", None) or {}, getattr(model, "default_cfg", None) or {}):
        if "input_size" in known:
            yield torch.randn(_BATCH, *known["input_size"])
    firsts: dict[type, Any] = {}
    for module in model.modules():
        for kind in _FIRST:
            if isinstance(module, kind):
                firsts.setdefault(kind, module)
    for kind, first in sorted(firsts.items(), key=lambda found: found[0] is not nn.Embedding):
        if kind is nn.Embedding:
            yield from (torch.randint(first.num_embeddings, (_BATCH, time)) for time in (_TIME, 2))
        elif kind is nn.Linear:
            yield from (torch.randn(*shape, first.in_features) for shape in ((_BATCH, _TIME), (_BATCH,)))
        else:
            for size in (getattr(model, "image_size", None), 224, 32):
                if isinstance(size, int):
                    yield torch.randn(_BATCH, first.in_channels, *[size] * _DIMENSIONS[kind])


def _of_transformers(model: Any) -> Iterator[Call]:
    name = model.main_input_name
    taken = inspect.signature(type(model).forward).parameters
    takes_more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values())
    if name == "pixel_values":
        config = model.config
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        pixels = torch.randn(_BATCH, getattr(config, "num_channels", 3), height, width)
        labels = {"labels": torch.zeros(_BATCH, dtype=torch.long)} if "labels" in taken else {}
        yield from (((), {name: pixels, **more}) for more in ([labels, {}] if labels else [{}]))
        return
    yield from _of_text(model, "labels" in taken or takes_more)


def _of_text(model: Any, takes_labels: bool) -> Iterator[Call]:
    config, kind = model.config, type(model).__name__
    tokens = torch.randint(1, int(getattr(config, "vocab_size", 0) or 2), (_BATCH, _TIME))  # (batch, time)
    mask = torch.ones_like(tokens)
    mask[-1, -2:] = 0
    both = {"input_ids": tokens, "attention_mask": mask}
    decoder = {"decoder_input_ids": tokens} if getattr(config, "is_encoder_decoder", False) else {}
    if takes_labels and any(sign in kind for sign in _TOKEN_LABELS):
        yield (), {**both, "labels": tokens.masked_fill(mask == 0, -100)}
    if takes_labels:
        yield (), {**both, "labels": torch.zeros(_BATCH, dtype=torch.long)}  # of whole sequences
    yield (), {**both, **decoder}
    yield (), {name: value[:1] for name, value in {"input_ids": tokens, **decoder}.items()}

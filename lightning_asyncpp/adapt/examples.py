"""Examples of what models are called with, where they say enough of themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.cut.network import called_by_steps
from lightning_asyncpp.core.tree import map_tensors

Call = tuple[tuple, dict[str, Any]]
_BATCH, _TIME = 2, 8
_DIMENSIONS: dict[type, int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
_TOKEN_LABELS = ("CausalLM", "LMHead", "MaskedLM", "ConditionalGeneration")


def call_of(example: Any) -> Call:
    """The arguments that an example stands for: a mapping of keyword ones, positional ones, or the only one."""
    if isinstance(example, Mapping):
        return (), dict(example)
    # A tensor is a sequence as well: of its rows.
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def copied(args: tuple, kwargs: Mapping[str, Any]) -> Call:
    """Arguments that the model may change in place."""
    return map_tensors(Tensor.clone, tuple(args)), map_tensors(Tensor.clone, dict(kwargs))


def examples_of(model: nn.Module) -> Iterator[Call]:
    """Calls that may fit, the richest first."""
    if hasattr(model, "config") and hasattr(model, "main_input_name"):
        yield from _of_transformers(model)
        return
    needed = _num_needed(model)
    for first in _first_arguments(model):
        # Behind it another sequence or image; a class or a moment for each sample.
        for other in (first, torch.randint(2, (_BATCH,)), torch.rand(_BATCH)) if needed > 1 else (first,):
            yield (first, *[other] * (needed - 1)), {}


def _num_needed(model: nn.Module) -> int:
    """How many positional arguments a model cannot do without."""
    parameters = list(inspect.signature(type(called_by_steps(model)).forward).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in kinds and parameter.default is parameter.empty for parameter in parameters)


def _first_arguments(model: nn.Module) -> Iterator[Tensor]:
    """What the first layer may take: the first of each kind, as submodules come in any order; tokens first."""
    known = getattr(model, "pretrained_cfg", None) or {}  # of timm
    if "input_size" in known:
        yield torch.randn(_BATCH, *known["input_size"])
    firsts: dict[type, Any] = {}
    for module in model.modules():
        for kind in (nn.Embedding, nn.Linear, *_DIMENSIONS):
            if isinstance(module, kind):
                firsts.setdefault(kind, module)
    for kind, first in sorted(firsts.items(), key=lambda found: found[0] is not nn.Embedding):
        if kind is nn.Embedding:
            yield from (torch.randint(first.num_embeddings, (_BATCH, time)) for time in (_TIME, 2))
        elif kind is nn.Linear:
            yield from (torch.randn(*shape, first.in_features) for shape in ((_BATCH, _TIME), (_BATCH,)))
        else:
            sizes = (getattr(model, "image_size", 224), 224, 32)
            yield from (torch.randn(_BATCH, first.in_channels, *[size] * _DIMENSIONS[kind]) for size in sizes)


def _of_transformers(model: Any) -> Iterator[Call]:
    taken = inspect.signature(type(model).forward).parameters
    classes = {"labels": torch.zeros(_BATCH, dtype=torch.long)}
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", 224)
        sizes = size if isinstance(size, (tuple, list)) else (size, size)
        pixels = {"pixel_values": torch.randn(_BATCH, getattr(model.config, "num_channels", 3), *sizes)}
        yield (), {**pixels, **(classes if "labels" in taken else {})}
        yield (), pixels
        return
    tokens = torch.randint(1, int(getattr(model.config, "vocab_size", 0) or 2), (_BATCH, _TIME))  # (batch, time)
    mask = torch.ones_like(tokens)
    mask[-1, -2:] = 0
    both = {"input_ids": tokens, "attention_mask": mask}
    decoder = {"decoder_input_ids": tokens} if getattr(model.config, "is_encoder_decoder", False) else {}
    if "labels" in taken or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        if any(sign in type(model).__name__ for sign in _TOKEN_LABELS):
            yield (), {**both, "labels": tokens.masked_fill(mask == 0, -100)}
        yield (), {**both, **classes}
    yield (), {**both, **decoder}
    yield (), {name: value[:1] for name, value in {"input_ids": tokens, **decoder}.items()}

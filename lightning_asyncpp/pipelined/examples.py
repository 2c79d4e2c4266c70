"""Examples of what models are called with, where they say enough of themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

Call = tuple[tuple, dict[str, Any]]
_BATCH, _TIME = 2, 8
_TOKEN_LABELS = ("CausalLM", "LMHead", "MaskedLM", "ConditionalGeneration")


def examples_of(model: nn.Module) -> Iterator[Call]:
    """Calls that may fit, the richest first."""
    if hasattr(model, "config") and hasattr(model, "main_input_name"):
        yield from _of_transformers(model)
        return
    first = next((m for m in model.modules() if isinstance(m, (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d))), None)
    sizes = [getattr(model, "pretrained_cfg", None) or {}, getattr(model, "default_cfg", None) or {}]
    for known in sizes:
        if "input_size" in known:
            yield (torch.randn(_BATCH, *known["input_size"]),), {}
    if isinstance(first, nn.Embedding):
        yield (torch.randint(first.num_embeddings, (_BATCH, _TIME)),), {}
    elif first is not None:
        dimensions = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}[type(first)]
        for size in (getattr(model, "image_size", None), 224, 32):
            if isinstance(size, int):
                yield (torch.randn(_BATCH, first.in_channels, *[size] * dimensions),), {}


def _of_transformers(model: nn.Module) -> Iterator[Call]:
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
    config = model.config
    tokens = torch.randint(1, int(getattr(config, "vocab_size", 0) or 2), (_BATCH, _TIME))
    mask = torch.ones_like(tokens)
    mask[-1, -2:] = 0
    kind = type(model).__name__
    labels = tokens.masked_fill(mask == 0, -100) if any(sign in kind for sign in _TOKEN_LABELS) or takes_more else None
    is_pair = bool(getattr(config, "is_encoder_decoder", False))
    if labels is not None:
        yield (), {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    yield (), {"input_ids": tokens, "attention_mask": mask, "labels": torch.zeros(_BATCH, dtype=torch.long)}
    decoder = {"decoder_input_ids": tokens} if is_pair else {}
    yield (), {"input_ids": tokens, "attention_mask": mask, **decoder}
    yield (), {"input_ids": tokens[:1], **({"decoder_input_ids": tokens[:1]} if is_pair else {})}

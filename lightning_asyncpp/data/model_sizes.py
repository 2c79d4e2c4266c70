"""Sizes of the model that the data is for, where a Trainer knows it."""

from __future__ import annotations

from typing import Any

_OTHER_NAMES = {"context_length": "max_position_embeddings"}  # of transformers


def size_of_model(trainer: Any, name: str) -> int | None:
    """Read a size from the ``config`` of a trainer's model; ``None`` if there is no such size.

    Args:
        trainer: of the data module; ``None`` for none.
        name: ``"vocab_size"`` or ``"context_length"``, as ``GPTConfig`` calls them.
    """
    model = None if trainer is None else getattr(trainer, "lightning_module", None)
    config = getattr(model, "config", None)
    if callable(text := getattr(config, "get_text_config", None)):
        config, name = text(), _OTHER_NAMES.get(name, name)
    size = getattr(config, name, None)
    return size if isinstance(size, int) else None

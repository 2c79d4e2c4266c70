"""Checkpoints that Fabric is given and that were not written for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from lightning_asyncpp.core.checkpoint.origin import FABRIC, TRAINER, WEIGHTS, Origin, origin_of
from lightning_asyncpp.errors import ConfigurationError


@contextmanager
def told_who_wrote_it(files: CheckpointIO, path: Any, weights_only: bool | None, strategy: str) -> Iterator[None]:
    """Where a checkpoint cannot be loaded, say who wrote it and what reads it, if that is the reason.

    Args:
        files: reads it.
        path: of the checkpoint.
        weights_only: as it is loaded.
        strategy: whose checkpoints can be loaded: ``PIPELINE`` or ``DELAYED_GRADIENT``.

    Raises:
        ConfigurationError: a Trainer or another strategy of ours wrote it, or it holds weights where more is asked for.
    """
    try:
        yield
    except (KeyError, RuntimeError, ValueError) as error:
        origin = origin_of(files.load_checkpoint(path, weights_only=weights_only))
        is_crossed = origin.writer in (TRAINER, FABRIC) and (origin.writer, origin.strategy) != (FABRIC, strategy)
        if not is_crossed and not (origin.writer == WEIGHTS and isinstance(error, KeyError)):
            raise
        raise ConfigurationError(f"fabric.load: {str(path)!r} {origin.description}{_mend(origin)}") from error


def _mend(origin: Origin) -> str:
    if origin.writer == WEIGHTS:
        return ""
    where = "'state_dict' (without the 'model.' before its names)" if origin.writer == TRAINER else "the model's entry"
    return (
        f". Here it can give its weights alone: load {where} into the whole model (load_state_dict) before"
        " fabric.setup_module"
    )

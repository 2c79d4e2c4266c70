"""The link ``last.ckpt`` of ``ModelCheckpoint(save_last="link")``, which at any time leads to a whole checkpoint."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_asyncpp.durable import replace_durably
from lightning_asyncpp.pipeline.private_names import required


def link_when_written(trainer: L.Trainer, then: Callable[[Callable[[], None]], None]) -> None:
    """Let callbacks replace their link at once, where Lightning removes it first, and when what it leads to is there.

    Args:
        trainer: with the callbacks.
        then: calls a function when the newest save is complete.

    Raises:
        PrivateNameError: Lightning links in another way by now.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.save_last == "link":
            required(callback, "_link_checkpoint", "replace the link to the last checkpoint")
            callback._link_checkpoint = partial(_link, then)  # type: ignore[method-assign]


def _link(then: Callable[[Callable[[], None]], None], trainer: L.Trainer, filepath: str, linkpath: str) -> None:
    if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
        then(partial(_replace, Path(filepath), Path(linkpath)))
    trainer.strategy.barrier()


def _replace(checkpoint: Path, link: Path) -> None:
    written = link.with_name(f".{link.name}.{secrets.token_hex(4)}.partial")
    try:
        written.symlink_to(os.path.relpath(checkpoint, link.parent))
        replace_durably(written, link)
    finally:
        written.unlink(missing_ok=True)

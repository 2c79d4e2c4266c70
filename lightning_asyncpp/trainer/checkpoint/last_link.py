"""The link ``last.ckpt`` of ``ModelCheckpoint(save_last="link")``, which at any time leads to a whole checkpoint."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_asyncpp.private_names import required
from lightning_asyncpp.storage.durable import replace_durably

Then = Callable[[Callable[[], None]], None]


def link_when_written(trainer: L.Trainer, then: Then) -> None:
    """Let callbacks replace their link at once, when what it leads to is there, and before what it led to goes.

    Lightning removes the older checkpoint, and then the link, before it makes the new link.

    Args:
        trainer: with the callbacks.
        then: calls a function when the newest save is complete.

    Raises:
        PrivateNameError: Lightning links or removes in another way by now.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.save_last == "link":
            _LastLink(callback, then).install()


class _LastLink:
    """The link of one callback.

    Args:
        callback: whose.
        then: calls a function when the newest save is complete.
    """

    def __init__(self, callback: ModelCheckpoint, then: Then) -> None:
        self.callback, self.then = callback, then
        self.led_to: str | None = None  # goes when the link leads elsewhere

    def install(self) -> None:
        for name in ("_link_checkpoint", "_remove_checkpoint"):
            required(self.callback, name, "replace the link to the last checkpoint")
        self.callback._link_checkpoint = self._link  # type: ignore[method-assign]
        self.callback._remove_checkpoint = self._remove  # type: ignore[method-assign]

    def _remove(self, trainer: L.Trainer, filepath: str) -> None:
        link = self.callback.last_model_path
        is_led_to = os.path.islink(link) and os.path.realpath(link) == os.path.realpath(filepath)
        if is_led_to and not os.path.islink(filepath):  # it may be the link of an earlier epoch
            self.led_to = filepath
        else:
            trainer.strategy.remove_checkpoint(filepath)

    def _link(self, trainer: L.Trainer, filepath: str, linkpath: str) -> None:
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            self.then(partial(_replace, Path(filepath), Path(linkpath)))
        led_to, self.led_to = self.led_to, None
        if led_to is not None and led_to != filepath:
            trainer.strategy.remove_checkpoint(led_to)
        trainer.strategy.barrier()


def _replace(checkpoint: Path, link: Path) -> None:
    written = link.with_name(f".{link.name}.{secrets.token_hex(4)}.partial")
    try:
        written.symlink_to(os.path.relpath(checkpoint, link.parent))
        replace_durably(written, link)
    finally:
        written.unlink(missing_ok=True)

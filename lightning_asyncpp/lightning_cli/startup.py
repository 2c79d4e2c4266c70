"""What the command says while it starts: a few lines on the standard error output; nothing heavy is imported."""

from __future__ import annotations

import logging
import os
import sys

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")


def is_first_process() -> bool:
    """Whether this process was started by hand, or as the first of those that torchrun, Slurm or Lightning start."""
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)


def say(text: str) -> None:
    """Say what is done now, unless another process does."""
    if is_first_process():
        sys.stderr.write(f"asyncpp: {text}\n")
        sys.stderr.flush()


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def say_what_is_logged() -> None:
    """Have what the package logs as information said as well, as by the data that are prepared."""
    logger = logging.getLogger("lightning_asyncpp")
    if logger.handlers or logger.level:
        return  # whoever called this has chosen
    logger.addHandler(_Said())
    logger.setLevel(logging.INFO)

"""Benchmarks: ``python -m research.benchmarks COMMAND [--help]``."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "schedule": "how busy schedules keep stages that sleep",
    "compute": "what a pipeline without a flush gains when stages compute",
    "network": "what it gains in training a GPT over a slow network (Linux, root)",
    "time-to-loss": "seconds of training until a validation loss is reached",
    "optimizer": "time of an optimizer's step, and what Error Feedback adds",
    "draw": "the ideal timelines with and without a flush, as a picture",
}


def main(argv: list[str]) -> None:
    """Run a command, each of which is a module beside this one."""
    if not argv or argv[0] not in COMMANDS:
        lines = "\n".join(f"  {name:<14}{text}" for name, text in COMMANDS.items())
        sys.exit(f"usage: python -m research.benchmarks COMMAND [--help]\n\n{lines}")
    importlib.import_module(f"research.benchmarks.{argv[0].replace('-', '_')}").main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])

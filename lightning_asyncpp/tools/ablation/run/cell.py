"""One training of an ablation, a process: ``python -m lightning_asyncpp.tools.ablation.run.cell FOLDER``."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_asyncpp import cli
from lightning_asyncpp.errors import NonFiniteGradientError
from lightning_asyncpp.tools.ablation.recipe.cell_config import own_sources
from lightning_asyncpp.tools.ablation.recipe.yaml_files import read_yaml, write_yaml
from lightning_asyncpp.tools.ablation.results import CellResult, thinned, write_result
from lightning_asyncpp.tools.ablation.run.conditions import device_name, versions
from lightning_asyncpp.tools.ablation.run.recorder import DivergedError, Recorder
from lightning_asyncpp.tools.processes import end_with_parent

CELL = "cell.yaml"
CHANGED = 75
"""Exit code of a training that was not started because the user's code has changed since it got its name."""


class ChangedError(RuntimeError):
    """The user's code is not what the training was named by."""


def main(argv: list[str] | None = None) -> None:
    """Train what the folder's ``cell.yaml`` describes, and write ``result.json`` there.

    Its key ``config`` is a recipe of ``asyncpp fit`` with a ``Recorder`` among its callbacks, ``sources`` are the
    digests of the user's files (:func:`own_sources`) that the folder's name was made of.
    """
    parser = argparse.ArgumentParser(prog="ablation.cell", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, help="process to end with")
    arguments = parser.parse_args(argv)
    if arguments.parent is not None:
        die_with(arguments.parent)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    try:
        write_result(arguments.folder, train(arguments.folder))
    except ChangedError as error:
        print(error, file=sys.stderr)
        raise SystemExit(CHANGED) from None


def train(folder: Path) -> CellResult:
    """Train the cell of ``folder`` in this process.

    Raises:
        ChangedError: the user's code is not what the folder's name was made of.
        SystemExit: the parser of ``asyncpp fit`` refuses the configuration.
        RuntimeError: the training never validated.
        Exception: whatever the training raises, but for its divergence, which is a result.
    """
    path, content = folder / "fit.yaml", read_yaml(folder / CELL)
    _check_sources(content.get("sources") or {}, content["config"])
    write_yaml(path, content["config"])
    Recorder.current = None
    try:
        cli.run(["fit", "--config", str(path)])
        _validate_last_step(_recorder())
    except (DivergedError, NonFiniteGradientError) as error:
        return _result(_recorder(), str(error))
    return _result(_recorder(), None)


def die_with(parent: int) -> None:
    """End this process when ``parent``, which started it, ends in whatever way."""
    if not end_with_parent():
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before this line
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _check_sources(wanted: Mapping[str, str], config: Mapping[str, Any]) -> None:
    # What this finds is imported from now on: an edit after this line does not reach the training.
    found = own_sources(config)
    changed = [name for name, digest in wanted.items() if found.get(name) != digest]
    if changed:
        raise ChangedError(
            f"the code of {', '.join(changed)} has changed since `asyncpp ablate` was called; call it again: what was"
            " trained with the old code stays apart"
        )


def _recorder() -> Recorder:
    if Recorder.current is None:
        raise RuntimeError("the training did not start; its configuration needs the callback Recorder")
    return Recorder.current


def _validate_last_step(recorder: Recorder) -> None:
    trainer = recorder.trainer
    assert trainer is not None
    if not recorder.curve or recorder.curve[-1][0] != trainer.global_step:
        trainer.validate(trainer.lightning_module, datamodule=trainer.datamodule, verbose=False)  # type: ignore[attr-defined]
    if not recorder.curve:
        raise RuntimeError("there was no validation: the data has no validation batches, or limit_val_batches is 0")


def _result(recorder: Recorder, diverged: str | None) -> CellResult:
    assert recorder.trainer is not None
    device = device_name(recorder.trainer.strategy.root_device)
    return CellResult(
        status="finished" if diverged is None else "diverged",
        loss=recorder.curve[-1][1] if diverged is None else None,
        steps=recorder.step,
        seconds=round(recorder.seconds, 3),
        metric=recorder.metric,
        curve=recorder.curve,
        train_curve=thinned(recorder.train_curve),
        reason=diverged or "",
        versions=versions(device, torch.get_num_threads()),
    )


if __name__ == "__main__":
    main()

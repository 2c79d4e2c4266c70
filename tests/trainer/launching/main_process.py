"""Scenarios in a process of their own that starts the ranks itself, as a notebook does."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import torch

from tests.helpers.pool import Outcome
from tests.helpers.trainer import Run, make_trainer
from tests.helpers.workers import free_port, worker_context


def outcome_of(scenario: Callable[..., Any], *args: Any, timeout: float = 40.0) -> Outcome:
    """Run a scenario; a hang fails the test, and all of its processes end."""
    context = worker_context()
    results = context.Queue()
    process = context.Process(target=_work, args=(results, scenario, args))
    process.start()
    try:
        outcome: Outcome = results.get(timeout=timeout)
        process.join(timeout)
        return outcome
    finally:
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()


def run(scenario: Callable[..., Any], *args: Any, timeout: float = 40.0) -> Any:
    """Run a scenario that must not fail."""
    outcome = outcome_of(scenario, *args, timeout=timeout)
    assert not outcome.error, outcome.trace
    return outcome.value


def _work(results: Any, scenario: Callable[..., Any], args: tuple) -> None:
    os.setpgid(0, 0)
    os.environ.update(OMP_NUM_THREADS="1", MASTER_PORT=str(free_port()))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        outcome = Outcome(scenario(*args))
    except BaseException as error:
        outcome = Outcome(None, type(error).__name__, str(error), traceback.format_exc())
    results.put(outcome)


def starting(run: Run, devices: int, method: str = "fork", **more: Any) -> L.Trainer:
    """A Trainer that starts its ranks itself."""
    os.environ.update(WORLD_SIZE=str(devices), LOCAL_WORLD_SIZE=str(devices))
    return make_trainer(replace(run, options=run.options | {"start_method": method}), **more)

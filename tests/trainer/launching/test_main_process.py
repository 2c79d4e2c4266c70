"""With start_method="fork" or "spawn", the process that starts the ranks has the whole trained model afterwards."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_asyncpp import PipelineModule
from tests.helpers import programs as forked
from tests.helpers.cases import DIM
from tests.helpers.modules import EMA
from tests.helpers.modules import SECOND_NAMES_RUN as SECOND_NAMES
from tests.helpers.oracle import assert_equal_weights
from tests.helpers.pool import Outcome, free_port, impatient, worker_context
from tests.helpers.resumable import ONE_PROCESS, saving
from tests.helpers.trainer import Net, Run, arrays, fit, loader, make_trainer, plain_metrics, val_loaders
from tests.trainer.launching.test_several_trainers import RUN as SEVERAL
from tests.trainer.launching.test_several_trainers import train_twice_and_validate

PLAIN = Run(Net, options={"microbatches": 4}, samples=24, val_samples=(16,), trainer={"enable_checkpointing": True})


def outcome_of(scenario: Callable[..., Any], *args: Any, timeout: float = 40.0) -> Outcome:
    """Run a scenario in a new process group, and return its outcome; if it hangs, kill the group and fail the test."""
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
    """Run a scenario that must not fail, and return its result."""
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
    """Return a Trainer that starts its ranks itself."""
    os.environ.update(WORLD_SIZE=str(devices), LOCAL_WORLD_SIZE=str(devices))
    return make_trainer(replace(run, options=run.options | {"start_method": method}), **more)


class Lazy(PipelineModule, Net):
    """Model that ranks build on the meta device; its layer fills a buffer that is not in the state_dict."""

    def __init__(self, run: Run) -> None:
        Net.__init__(self, run)
        self.model = None

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, DIM), Shift(), nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, 1))


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.empty(DIM), persistent=False)

    def reset_parameters(self) -> None:
        self.by.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


CASES: dict[str, tuple[Run, int]] = {
    "second names, buffers": (SECOND_NAMES, 2),
    "built by the ranks": (replace(PLAIN, module=Lazy), 3),
    "a callback that averages": (replace(PLAIN, callbacks=EMA), 2),
}


def fit_from_outside(run: Run, devices: int, method: str) -> dict[str, Any]:
    """Train, and return what the starting process, which is not a rank, has afterwards."""
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    trainer = starting(run, devices, method)
    own = "train_dataloader" in vars(type(module))
    trainer.fit(module, None if own else loader(run), val_loaders(run) or None)
    return {
        "state": arrays(module.state_dict()), "callback_metrics": plain_metrics(trainer),
        "full": arrays(trainer.strategy.full_state_dict()),  # type: ignore[attr-defined]
        "best": getattr(trainer.checkpoint_callback, "best_model_path", ""),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("case", "method"),
    [*((case, "fork") for case in CASES), pytest.param("built by the ranks", "spawn", marks=pytest.mark.slow)],
)
def test_the_starting_process_has_the_trained_model(case: str, method: str, tmp_path: Path) -> None:
    of, devices = CASES[case]
    kept, own = (replace(of, callbacks=(*of.callbacks, saving(tmp_path / name))) for name in ("kept", "own"))
    (expected,), found = ONE_PROCESS.run(devices, fit, kept), run(fit_from_outside, own, devices, method, timeout=200.0)
    assert_equal_weights(found["state"], expected["full_afterwards"])
    assert_equal_weights(found["full"], found["state"])
    assert found["callback_metrics"] == expected["callback_metrics"]
    assert Path(found["best"]).relative_to(tmp_path / "own") == Path(expected["best"]).relative_to(tmp_path / "kept")
    assert_equal_weights(found["state"], arrays(torch.load(found["best"], weights_only=True)["state_dict"]))


def live_on() -> dict[str, Any]:
    """Fit, then fit and validate the same module with other Trainers, as in a notebook."""
    L.seed_everything(SEVERAL.seed, verbose=False)
    module = SEVERAL.module(SEVERAL)
    first = starting(SEVERAL, 2, enable_checkpointing=True)
    first.fit(module, loader(SEVERAL))
    with pytest.raises(Exception, match="this process only started the ranks"):
        first.save_checkpoint("never.ckpt")
    starting(SEVERAL, 3).fit(module, loader(SEVERAL))
    losses = starting(SEVERAL, 2).validate(module, val_loaders(SEVERAL), verbose=False)
    return {"weights": arrays(module.state_dict()), "losses": losses}


def test_what_follows_goes_on_from_the_trained_model() -> None:
    """Later runs continue from the trained model, also with other numbers of stages, since the module was never cut."""
    (expected,), found = ONE_PROCESS.run(3, train_twice_and_validate, SEVERAL), run(live_on)
    assert_equal_weights(found["weights"], expected["weights"])
    assert found["losses"] == expected["losses"]


class Fails(Net):
    """Model that raises an error on one rank."""

    on_rank = 2

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.trainer.global_rank == self.on_rank:
            raise ValueError("the user's own mistake")


def fail_and_mend() -> Any:
    """Check that a failed fit, as in a notebook cell, changes no weights; fit again, and return the model's state."""
    L.seed_everything(PLAIN.seed, verbose=False)
    module, trainer = Fails(PLAIN), starting(PLAIN, 3, enable_checkpointing=False)
    before = arrays({name: tensor.clone() for name, tensor in module.state_dict().items()})
    with pytest.raises(Exception, match="ValueError: the user's own mistake"):
        trainer.fit(module, loader(PLAIN), val_loaders(PLAIN))
    assert_equal_weights(arrays(module.state_dict()), before)
    module.on_rank = -1
    trainer.fit(module, loader(PLAIN), val_loaders(PLAIN))
    return arrays(module.state_dict())


def test_a_failure_of_a_rank_reaches_the_starting_process() -> None:
    (expected,) = ONE_PROCESS.run(3, fit, replace(PLAIN, trainer={}))
    assert_equal_weights(run(impatient, fail_and_mend), expected["full_afterwards"])


# Like a notebook cell, this defines a class outside any file, and sys.ps1, by which Lightning detects a session.
CELL = """
import sys
sys.ps1 = ">>> "
import lightning as L, torch
import lightning_asyncpp
from tests.helpers.trainer import Net as Base, Run, loader

class Net(Base):
    pass

def train(strategy, devices):
    module, run = Net(Run(Net)), Run(Net, samples=16)
    trainer = L.Trainer(
        devices=devices, strategy=strategy, max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=sys.argv[1],
    )
    trainer.fit(module, loader(run))
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
    return all(torch.equal(saved[name], value) for name, value in module.state_dict().items())

print([train("async_pipeline_notebook", devices) for devices in (1, 2)], train("sync_pipeline_notebook", 2))
"""


def test_a_session_trains_on_one_device_and_on_two(tmp_path: Path) -> None:
    done = forked.run(("-c", CELL, str(tmp_path)), tmp_path)
    assert "[True, True] True" in done.stdout, done.stderr

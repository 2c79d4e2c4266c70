"""A run that is made longer goes on in the epoch in whose middle it ended, by ``max_steps`` or a stop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.trainer.checkpoint.resumable import Showing, fit_showing, write_litdata
from tests.trainer.checkpoint.test_exact_resume import EPOCHS, run_of
from tests.trainer.pool import Pools
from tests.trainer.reference import assert_equal_weights, joined_weights
from tests.trainer.runs import Run

LAST = {"save_last": True, "save_top_k": 0}  # written when the training has ended
EPOCH_ENDS = {"save_top_k": -1, "filename": "last", "save_on_train_epoch_end": True}
CUT = 8  # of an epoch of 5 batches the third
EPOCH = 10  # where that epoch ends


class StopsAt(L.Callback):
    """Asks for an end, as EarlyStopping and Timer do."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop = True


class Counting(Showing):
    """Notes which epochs and validations there were; draws and logs where an epoch ends."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.happened: list[str] = []

    def on_train_epoch_end(self) -> None:
        self.happened.append(f"epoch {self.current_epoch}, step {self.trainer.global_step}")

    def on_validation_epoch_end(self) -> None:
        self.happened.append(f"validation, step {self.trainer.global_step}")


def fit_counting(run: Run, kind: str, folder: str) -> dict[str, Any]:
    made: list[Counting] = []

    def make(run: Run) -> Counting:
        made.append(Counting(run))
        return made[-1]

    result = fit_showing(run, kind, folder, make=make)
    return result | {"happened": made[-1].happened}


def cut_and_go_on(
    pools: Pools, run: Run, kind: str, folder: Path, stages: int, cutting: dict[str, Any], saving: dict[str, Any]
) -> None:
    """The cut run and the one that goes on from it are together the whole one, but for the end of the cut epoch."""
    write_litdata(folder / "data", run.samples)
    fit = partial(pools.run, stages, fit_counting)
    whole = fit(replace(run, callbacks=()), kind, str(folder / "data"))
    checkpoint = (ModelCheckpoint, {"dirpath": folder} | saving)
    stop = ((StopsAt, {"step": cutting["stop"]}),) if "stop" in cutting else ()
    trainer = run.trainer | {name: value for name, value in cutting.items() if name != "stop"}
    cut = fit(replace(run, callbacks=(*stop, checkpoint), trainer=trainer), kind, str(folder / "data"))
    again = replace(run, callbacks=(), ckpt_path=str(folder / "last.ckpt"))
    resumed = fit(again, kind, str(folder / "data"))
    step = cutting.get("max_steps", CUT) + (
        bool(stop) and run.strategy != "delayed"
    )  # all ranks agree with the next update
    assert cut[0]["happened"][-1] == f"epoch 1, step {step}"
    is_cut = step != EPOCH
    expected = [*cut[0]["happened"][: -1 if is_cut else None], *resumed[0]["happened"]]
    if stop:  # Lightning validates when a run is asked to end
        expected.remove(f"validation, step {step}")
    assert expected == whole[0]["happened"]
    assert [*cut[0]["numbers"], *resumed[0]["numbers"]] == whole[0]["numbers"]
    assert_equal_weights(joined_weights(resumed, stages), joined_weights(whole, stages))
    assert resumed[0]["records"] == whole[0]["records"][-len(resumed[0]["records"]) :]
    if is_cut:  # else what is logged at the epoch's end is still to come, if the checkpoint was written there
        assert len(resumed[0]["records"]) == sum(number >= step for number, _ in whole[0]["records"])


@pytest.mark.parametrize(
    "saving", [LAST, pytest.param(EPOCH_ENDS, marks=pytest.mark.slow)], ids=["last", "epoch's end"]
)
@pytest.mark.parametrize(
    ("strategy", "stages", "options", "cutting"),
    [
        pytest.param("async", 3, {}, {"max_steps": CUT}, marks=pytest.mark.slow),
        ("async", 3, {}, {"stop": CUT}),
        pytest.param("async", 3, {}, {"max_steps": EPOCH}, marks=pytest.mark.slow),
        pytest.param("delayed", 1, {}, {"max_steps": CUT}, marks=pytest.mark.slow),
        pytest.param("delayed", 1, {}, {"max_steps": EPOCH}, marks=pytest.mark.slow),
        # With whole batches the validation that Lightning adds draws from the training's random numbers.
        pytest.param("delayed", 1, {"micro_batches": 2}, {"stop": CUT}, marks=pytest.mark.slow),
    ],
    ids=["async-max_steps", "async-stop", "async-whole", "delayed-max_steps", "delayed-whole", "delayed-stop"],
)
def test_it_goes_on_in_the_epoch(
    strategy: str, stages: int, options: dict[str, Any], cutting: dict[str, Any], saving: dict[str, Any],
    pools: Pools, tmp_path: Path,
) -> None:  # fmt: skip
    run = run_of(
        tmp_path, "stateful", EPOCHS, val_samples=(9,), scheduler="decay-epoch", strategy=strategy, options=options
    )
    cut_and_go_on(pools, run, "stateful", tmp_path, stages, cutting, saving)


@pytest.mark.parametrize("scheduler", ["plateau-step-train_loss", pytest.param("decay-step", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("strategy", "stages"), [("async", 2), pytest.param("delayed", 1, marks=pytest.mark.slow)])
def test_after_a_validation(strategy: str, stages: int, scheduler: str, pools: Pools, tmp_path: Path) -> None:
    """Which is not repeated; nor is what follows it."""
    trainer = EPOCHS | {"val_check_interval": 3}
    run = run_of(tmp_path, "litdata", trainer, val_samples=(9,), scheduler=scheduler, strategy=strategy)
    cut_and_go_on(pools, run, "litdata", tmp_path, stages, {"max_steps": CUT}, LAST)

"""A rank that fails while its process lives on, as in ``try: trainer.fit(...)``, keeps no other rank waiting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.helpers.pool import Pools, impatient
from tests.helpers.trainer import Net, Run, fit

STAGES = 3
SOON = 25.0  # seconds, including a grace period of five


class Raises(L.Callback):
    """Callback that raises an error on rank 1 only."""

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step >= 3:
            raise ArithmeticError("the user's own mistake")


class FullDisk(ModelCheckpoint):
    """Checkpoint callback that cannot write its second file; only rank 0 writes, while the others wait for it."""

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        if trainer.global_step > 2:
            trainer.strategy.checkpoint_io.save_checkpoint = self._fail  # type: ignore[method-assign]
        super()._save_checkpoint(trainer, filepath)

    @staticmethod
    def _fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")


RUN = Run(Net, samples=64, val_samples=(16,), options={"microbatches": STAGES}, trainer={"val_check_interval": 4})


def test_an_error_that_is_caught_on_one_rank_ends_all(pools: Pools) -> None:
    outcomes = pools.outcomes(STAGES, impatient, fit, replace(RUN, callbacks=((Raises, {}),)), timeout=SOON)
    assert [outcome.error for outcome in outcomes] == ["PeerLostError", "ArithmeticError", "PeerLostError"]
    line = "rank 1 (stage 1) failed first: ArithmeticError: the user's own mistake"
    assert [outcome.message.partition("\n")[0] for outcome in outcomes] == [line, "the user's own mistake", line]
    assert " in on_before_optimizer_step\n" in outcomes[0].message, "users look at rank 0"
    again = pools.outcomes(STAGES, fit, RUN, timeout=SOON)
    assert [outcome.error for outcome in again] == [""] * STAGES, "the next Trainer of these processes does not train"


def test_a_checkpoint_that_rank_0_cannot_write_ends_all(pools: Pools, tmp_path: Path) -> None:
    callback = (FullDisk, {"dirpath": str(tmp_path), "every_n_train_steps": 2, "save_top_k": -1})
    run = replace(RUN, callbacks=(callback,), trainer={"enable_checkpointing": True})
    outcomes = pools.outcomes(STAGES, fit, run, timeout=SOON)
    assert [outcome.error for outcome in outcomes] == ["OSError", "OtherStageFailedError", "OtherStageFailedError"]


# -- ranks that do different things: two stages, where rank 1 is the first and rank 0 the last ---------------------

TWO = Run(Net, options={"microbatches": 2})


class StopsAlone(L.Callback):
    """Callback that raises StopIteration on one rank, which ends Lightning's epoch as a shorter loader would."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_rank == 1 and index == 4:
            raise StopIteration


def test_an_epoch_that_ends_on_one_rank(pools: Pools) -> None:
    outcomes = pools.outcomes(2, impatient, fit, replace(TWO, callbacks=((StopsAlone, {}),)), timeout=SOON)
    assert [outcome.error for outcome in outcomes] == ["ProtocolError", "PeerLostError"]
    assert outcomes[0].message.startswith("rank 1 (stage 0) has ended before microbatch 8 (")
    assert "Usually the data loaders have different numbers of batches on these ranks" in outcomes[0].message
    assert "a hook or a dataset raised StopIteration" in outcomes[0].message


class EndsAlone(L.Callback):
    """Callback that ends the training on rank 0 only, after an epoch."""

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.should_stop = trainer.global_rank == 0


def test_a_training_that_ends_on_one_rank(pools: Pools) -> None:
    outcomes = pools.outcomes(
        2, fit, replace(TWO, callbacks=((EndsAlone, {}),), trainer={"max_epochs": 2}), timeout=SOON
    )
    assert {outcome.error for outcome in outcomes} <= {"ProtocolError", "PeerLostError"}, outcomes
    assert any("set trainer.should_stop" in outcome.message for outcome in outcomes)


class SavesAlone(L.Callback):
    """Callback that saves on rank 0 only, after training, when the other ranks are done and would never answer."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_rank == 0:
            trainer.save_checkpoint(self.path)


def test_a_save_on_one_rank_as_the_training_ends(pools: Pools, tmp_path: Path) -> None:
    run = replace(TWO, callbacks=((SavesAlone, {"path": tmp_path / "last.ckpt"}),))
    outcomes = pools.outcomes(2, fit, run, timeout=SOON)
    assert {outcome.error for outcome in outcomes} <= {"ProtocolError", "PeerLostError"}, outcomes
    assert any("ranks are in different calls" in outcome.message for outcome in outcomes)
    assert not (tmp_path / "last.ckpt").exists()

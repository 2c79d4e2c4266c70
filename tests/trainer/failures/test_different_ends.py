"""Ranks whose batches end at different places: all end, soon, and the error names what usually leads there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L

from tests.helpers.pool import Pools, impatient
from tests.helpers.trainer import Net, Run, fit

STAGES = 2  # rank 1 is the first stage, rank 0 the last
SOON = 20.0
RUN = Run(Net, options={"microbatches": STAGES})


class StopsAlone(L.Callback):
    """Raises on one rank what Lightning takes for the end of the epoch, as of a shorter loader."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_rank == 1 and index == 4:
            raise StopIteration


def test_an_epoch_that_ends_on_one_rank(pools: Pools) -> None:
    outcomes = pools.outcomes(STAGES, impatient, fit, replace(RUN, callbacks=((StopsAlone, {}),)), timeout=SOON)
    assert [outcome.error for outcome in outcomes] == ["ProtocolError", "PeerLostError"]
    assert outcomes[0].message.startswith("rank 1 (stage 0) has ended before microbatch 8 (")
    assert "Usually the data loaders have different numbers of batches on these ranks" in outcomes[0].message
    assert "raised StopIteration on one rank alone" in outcomes[0].message


class SavesAlone(L.Callback):
    """Saves on rank 0 when the training has ended: the others have nothing more to do, and would never answer."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_rank == 0:
            trainer.save_checkpoint(self.path)


def test_a_save_on_one_rank_as_the_training_ends(pools: Pools, tmp_path: Path) -> None:
    run = replace(RUN, callbacks=((SavesAlone, {"path": tmp_path / "last.ckpt"}),))
    outcomes = pools.outcomes(STAGES, fit, run, timeout=SOON)
    assert {outcome.error for outcome in outcomes} <= {"ProtocolError", "PeerLostError"}, outcomes
    assert any("ranks are in different calls" in outcome.message for outcome in outcomes)
    assert not (tmp_path / "last.ckpt").exists()

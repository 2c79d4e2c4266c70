"""Ranks whose batches end at different places: all end, soon, and the error names what usually leads there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader, Subset

from tests.helpers.modules import Stream
from tests.helpers.pool import Pools, impatient
from tests.helpers.trainer import Net, Run, fit, make_trainer

STAGES = 2  # rank 1 is the first stage, rank 0 the last
SOON = 20.0
RUN = Run(Net, options={"microbatches": STAGES})
ENDS = {
    0: "this rank has ended before microbatch 8 (",
    1: "rank 1 (stage 0) has ended before microbatch 8 (",
}


class StopsAlone(L.Callback):
    """Raises on one rank what Lightning takes for the end of the epoch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_rank == self.rank and index == 4:
            raise StopIteration


class SavesAlone(L.Callback):
    """Saves on one rank when the training has ended."""

    def __init__(self, rank: int, path: Path) -> None:
        self.rank, self.path = rank, path

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_rank == self.rank:
            trainer.save_checkpoint(self.path)


def beginning(count: int) -> Stream:
    """The first samples of a stream."""
    stream = Stream(40)
    stream.samples = Subset(stream.samples, range(count))  # type: ignore[assignment]
    return stream


def run_on_streams(run: Run, what: str, shorter: int) -> None:
    """Run with streams of five batches, but of four on one rank."""
    module, trainer = run.module(run), make_trainer(run)
    whole, part = (DataLoader(beginning(n), batch_size=8) for n in (40, 32 if trainer.global_rank == shorter else 40))
    trainer.fit(module, *((part,) if what == "fit" else (whole, part)))


@pytest.mark.parametrize(("what", "shorter"), [("fit", 0), ("validate", 1)])
def test_a_loader_that_is_shorter_on_one_rank(pools: Pools, what: str, shorter: int) -> None:
    outcomes = pools.outcomes(STAGES, impatient, run_on_streams, RUN, what, shorter, timeout=SOON)
    assert [outcome.error for outcome in outcomes] == ["ProtocolError", "PeerLostError"]
    assert outcomes[0].message.startswith(ENDS[shorter])
    assert "Usually the data loaders have different numbers of batches on these ranks" in outcomes[0].message


def test_an_epoch_that_a_callback_ends_on_one_rank(pools: Pools) -> None:
    run = replace(RUN, callbacks=((StopsAlone, {"rank": 1}),))
    outcomes = pools.outcomes(STAGES, impatient, fit, run, timeout=SOON)
    assert [outcome.error for outcome in outcomes] == ["ProtocolError", "PeerLostError"]
    assert outcomes[0].message.startswith(ENDS[1])
    assert "raised StopIteration on one rank only" in outcomes[0].message


def test_a_save_on_one_rank_as_the_training_ends(pools: Pools, tmp_path: Path) -> None:
    """The others have nothing more to do, and would never answer."""
    run = replace(RUN, callbacks=((SavesAlone, {"rank": 0, "path": tmp_path / "last.ckpt"}),))
    outcomes = pools.outcomes(STAGES, fit, run, timeout=SOON)
    assert {outcome.error for outcome in outcomes} <= {"ProtocolError", "PeerLostError"}, outcomes
    assert any("ranks are in different calls" in outcome.message for outcome in outcomes)
    assert not (tmp_path / "last.ckpt").exists()

"""A rank that fails and whose process lives on, as under ``try: trainer.fit(...)``, keeps no other rank waiting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.helpers.pool import Pools, impatient
from tests.helpers.trainer import Net, Run, fit

STAGES = 3
SOON = 25.0  # seconds, of which five are grace


class Raises(L.Callback):
    """Fails on one rank alone, in one hook."""

    def __init__(self, rank: int, hook: str) -> None:
        self.rank = rank
        setattr(self, hook, self._raise)

    def _raise(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step >= 3:
            raise ArithmeticError("the user's own mistake")


class FullDisk(ModelCheckpoint):
    """Cannot write its second file; only rank 0 writes, while the others wait for it."""

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        if trainer.global_step > 2:
            trainer.strategy.checkpoint_io.save_checkpoint = self._fail  # type: ignore[method-assign]
        super()._save_checkpoint(trainer, filepath)

    @staticmethod
    def _fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")


RUN = Run(Net, samples=64, val_samples=(16,), options={"microbatches": STAGES}, trainer={"val_check_interval": 4})


@pytest.mark.parametrize(
    ("rank", "hook"),
    [(1, "on_before_optimizer_step"), pytest.param(0, "on_validation_batch_start", marks=pytest.mark.slow)],
)
def test_an_error_that_is_caught_on_one_rank_ends_all(pools: Pools, rank: int, hook: str) -> None:
    run = replace(RUN, callbacks=((Raises, {"rank": rank, "hook": hook}),))
    outcomes = pools.outcomes(STAGES, impatient, fit, run, timeout=SOON)
    assert [o.error for o in outcomes] == ["ArithmeticError" if r == rank else "PeerLostError" for r in range(STAGES)]
    line = f"rank {rank} (stage {STAGES - 1 - rank}) failed first: ArithmeticError: the user's own mistake"
    for r, outcome in enumerate(outcomes):
        assert outcome.message.startswith("the user's own mistake" if r == rank else line)
        assert (" in _raise\n" in outcome.message) == (r == 0 != rank), "users look at rank 0"
    again = pools.outcomes(STAGES, fit, RUN, timeout=SOON)
    assert [outcome.error for outcome in again] == [""] * STAGES, "the next Trainer of these processes does not train"


def test_a_checkpoint_that_rank_0_cannot_write_ends_all(pools: Pools, tmp_path: Path) -> None:
    callback = (FullDisk, {"dirpath": str(tmp_path), "every_n_train_steps": 2, "save_top_k": -1})
    run = replace(RUN, callbacks=(callback,), trainer={"enable_checkpointing": True})
    outcomes = pools.outcomes(STAGES, fit, run, timeout=SOON)
    assert [outcome.error for outcome in outcomes] == ["OSError", "OtherStageFailedError", "OtherStageFailedError"]

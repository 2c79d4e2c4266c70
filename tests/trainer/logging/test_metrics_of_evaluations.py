"""What evaluations measure: the same on all ranks, as in a single process, and whoever wrote the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.pool import Pools
from tests.helpers.resumable import ONE_PROCESS
from tests.helpers.trainer import Run
from tests.trainer.logging.measured import ClassifierNet, evaluate_checkpoint, fit_and_save, fit_measured

RUN = Run(
    ClassifierNet, "sync", {"microbatches": 2}, samples=48, batch_size=12, val_samples=(36,), shuffle=True
)  # fmt: skip
REPLICAS = replace(RUN, options={"microbatches": 3, "data_parallel_size": 2}, batch_size=6)


def test_callbacks_decide_alike_on_what_torchmetrics_objects_say(pools: Pools, tmp_path: Path) -> None:
    run = replace(REPLICAS, strategy="default", trainer={"max_epochs": 4})
    first, *others = pools.run(4, fit_measured, run, str(tmp_path))
    assert {"mean_loss", "val_accuracy", "val_f1", "logged_accuracy", "val_loss"} <= first["metrics"].keys()
    assert all(rank == first for rank in others)
    assert first["kept"]
    assert all(Path(path).is_file() for path in first["kept"])
    assert first["step"] == 8, "the second epoch is not half a unit better: training ends there, on every rank"
    assert first["metrics"]["mean_loss"] == pytest.approx(first["metrics"]["val_loss"], rel=1e-6)


def test_a_checkpoint_has_the_same_metrics_wherever_it_is_evaluated(pools: Pools, tmp_path: Path) -> None:
    """To the bit where the same microbatches run; whole batches, and sums over replicas, are rounded otherwise."""
    path = str(tmp_path / "written.ckpt")
    pools.run(2, fit_and_save, RUN, path)
    (expected,) = ONE_PROCESS.run(1, evaluate_checkpoint, RUN, path)
    wanted = np.concatenate(expected["predicted"])
    assert len(wanted) == 36
    read = {
        "two stages": ONE_PROCESS.run(2, evaluate_checkpoint, RUN, path),
        "two processes": pools.run(2, evaluate_checkpoint, RUN, path),
        "replicas": pools.run(4, evaluate_checkpoint, REPLICAS, path),
        "plain": [evaluate_checkpoint(replace(RUN, strategy="plain"), path)],
    }
    for reader, ranks in read.items():
        exact = reader.startswith("two")
        found = np.concatenate([part for rank in ranks for part in rank["predicted"]])
        for rank in ranks:
            assert rank["metrics"] == ranks[0]["metrics"], reader
            assert rank["metrics"] == (expected["metrics"] if exact else pytest.approx(expected["metrics"], rel=1e-6))
        assert_same(found, wanted, reader, exact)


def assert_same(found: Any, wanted: Any, reader: str, exact: bool) -> None:
    """Predictions are those of the samples; each replica has every other one."""
    if reader == "replicas":
        found, wanted = np.sort(found, axis=0), np.sort(wanted, axis=0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0 if exact else 1e-6, err_msg=reader)

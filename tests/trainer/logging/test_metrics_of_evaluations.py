"""What evaluations measure: the same on all ranks, as in a single process, and whoever wrote the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.pool import Pools
from tests.helpers.trainer import Run
from tests.trainer.logging.measured import ClassifierNet, evaluate_checkpoints, fit_and_save, fit_measured

RUN = Run(
    ClassifierNet, "sync", {"microbatches": 2}, samples=48, val_samples=(36,), shuffle=True, trainer={"max_epochs": 4}
)  # fmt: skip


@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), pytest.param(3, 1, marks=pytest.mark.slow), (2, 2)])
def test_callbacks_decide_alike_on_what_torchmetrics_objects_say(
    pools: Pools, stages: int, replicas: int, tmp_path: Path
) -> None:
    options = {"microbatches": 3, "data_parallel_size": replicas}
    run = replace(RUN, strategy="default", options=options, batch_size=12 // replicas)
    first, *others = pools.run(stages * replicas, fit_measured, run, str(tmp_path))
    assert {"mean_loss", "val_accuracy", "val_f1", "logged_accuracy", "val_loss"} <= first["callback_metrics"].keys()
    for rank in others:
        assert {**rank, "weights": None} == {**first, "weights": None}
    assert first["kept"]
    assert all(Path(path).is_file() for path in first["kept"])
    assert first["step"] == 8, "the second epoch is not half a unit better: training ends there, on every rank"
    assert first["callback_metrics"]["mean_loss"] == pytest.approx(first["callback_metrics"]["val_loss"], rel=1e-6)


WRITERS = {
    "plain": (1, replace(RUN, strategy="plain", options={})),
    "delayed": (1, replace(RUN, strategy="delayed", options={"microbatches": 2})),
    "two stages": (2, replace(RUN, strategy="default")),
    "three stages": (3, replace(RUN, options={"microbatches": 3, "partition": "uniform"})),
    "two replicas": (4, replace(RUN, options={"microbatches": 2, "data_parallel_size": 2}, batch_size=4)),
}
READERS = {
    "plain": (1, replace(RUN, strategy="plain", options={})),
    "delayed": (1, replace(RUN, strategy="delayed", options={"microbatches": 2})),
    "one stage": (1, RUN),
    "two stages": (2, replace(RUN, strategy="default")),
    "three stages": (3, RUN),
    "two replicas": (4, replace(RUN, options={"microbatches": 2, "data_parallel_size": 2}, batch_size=6)),
}
USUAL = ("two stages", "two replicas")
EXACT = ("one stage", "two stages", "three stages")


@pytest.fixture(scope="module")
def read(
    pools: Pools, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[dict[str, Any]]]:
    """Reader -> what each of its ranks found in the checkpoint of each writer whose test is among those that run."""
    folder = tmp_path_factory.mktemp("written")
    asked = {item.callspec.params.get("writer") for item in request.session.items if hasattr(item, "callspec")}
    paths = {name: str(folder / f"{name.replace(' ', '-')}.ckpt") for name in WRITERS if name in {*asked, *USUAL}}
    for name in paths:
        processes, run = WRITERS[name]
        pools.run(processes, fit_and_save, replace(run, trainer={"max_epochs": 1}), paths[name])
    runs = {name: (n, replace(run, batch_size=6 if n == 4 else 12)) for name, (n, run) in READERS.items()}
    return {name: pools.run(n, evaluate_checkpoints, run, paths) for name, (n, run) in runs.items()}


@pytest.mark.parametrize(
    "writer", [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in WRITERS]
)
def test_a_checkpoint_has_the_same_metrics_wherever_it_is_evaluated(
    read: dict[str, list[dict[str, Any]]], writer: str
) -> None:
    """To the bit where the same microbatches run; whole batches, and sums over replicas, are rounded otherwise."""
    expected = read["one stage"][0][writer]
    for reader, ranks in read.items():
        for rank in ranks:
            assert rank[writer]["metrics"] == ranks[0][writer]["metrics"], reader
        for found, wanted in zip(ranks[0][writer]["metrics"], expected["metrics"], strict=True):
            if reader in EXACT:
                assert found == wanted, reader
            assert found == pytest.approx(wanted, rel=1e-6), reader
        predictions(reader, [rank[writer]["predicted"] for rank in ranks], expected["predicted"])
    others = {name: found["metrics"][0]["val_loss"] for name, found in read["plain"][0].items() if name != writer}
    distinct = {*others.values(), expected["metrics"][0]["val_loss"]}
    assert len(distinct) >= min(4, len(others) + 1), "the checkpoints are not each other's"


def predictions(reader: str, ranks: list[list[np.ndarray]], expected: list[np.ndarray]) -> None:
    """Those of the samples; with replicas on the last stage of each."""
    found = np.concatenate([np.concatenate(parts) for parts in ranks if parts])
    wanted = np.concatenate(expected)
    assert found.shape == wanted.shape
    if reader == "two replicas":  # each replica has every other sample
        found, wanted = np.sort(found, axis=0), np.sort(wanted, axis=0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0 if reader in EXACT else 1e-6, err_msg=reader)

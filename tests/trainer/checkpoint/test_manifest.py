"""A run keeps its name through its resumes, and says in what it is another one than its checkpoint's."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_asyncpp.core.checkpoint import resumed
from lightning_asyncpp.core.checkpoint.origin import PIPELINE
from lightning_asyncpp.core.manifest import Manifest, changes, in_words, plain
from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW
from lightning_asyncpp.storage import lease
from lightning_asyncpp.storage.lease import Leases
from lightning_asyncpp.storage.loading import load
from lightning_asyncpp.tools.checkpoint.contents import describe, table
from lightning_asyncpp.trainer.identity import checkpoint_folders
from tests.trainer.checkpoint.test_checkpoints import RUN, TRAINER, ResumableNet
from tests.trainer.pool import Pools
from tests.trainer.runs import Run, fit, fit_and_hear, make_scheduler


def run_of(folder: Path, strategy: str = "async", **options: Any) -> Run:
    saving = (ModelCheckpoint, {"dirpath": folder, "save_top_k": -1, "filename": "{step}", "every_n_train_steps": 2})
    return replace(
        RUN, module=ResumableNet, callbacks=(saving,), strategy=strategy, trainer=TRAINER | {"max_epochs": 1},
        options={"micro_batches": 2, **options},
    )  # fmt: skip


def after(run: Run, folder: Path, step: int = 2, **changed: Any) -> Run:
    return replace(run, ckpt_path=str(folder / f"step={step}.ckpt"), **changed)


class OtherRate(ResumableNet):
    """Asks for another learning rate, and for a weaker correction, than the run that it goes on from."""

    train_dataloader = ResumableNet.train_dataloader

    def configure_optimizers(self) -> Any:
        base = functools.partial(MuonAdamW, lr=0.5, weight_decay=0.05)
        optimizer = ErrorFeedback(list(self.named_parameters()), base, strength=0.5)
        return {"optimizer": optimizer, "lr_scheduler": make_scheduler(self.run, optimizer)}


def fit_and_read(run: Run) -> tuple[list[str], list[str]]:
    """The warnings of a fit, and what it logs."""
    said: list[str] = []
    with mock.patch.object(resumed, "rank_zero_info", said.append):
        _, warned = fit_and_hear(run, "")
    return warned, said


@pytest.mark.parametrize("options", [{}, {"state_dict_type": "sharded"}])
def test_the_name_of_a_run(pools: Pools, tmp_path: Path, options: dict[str, Any]) -> None:
    run = run_of(tmp_path / "a", **options)
    pools.run(2, fit, run)
    pools.run(2, fit, after(run_of(tmp_path / "b", **options), tmp_path / "a"))
    pools.run(2, fit, run_of(tmp_path / "c", **options))
    first, again, other = (describe(tmp_path / name / "step=4.ckpt") for name in "abc")
    assert first["manifest"]["run"] == again["manifest"]["run"] != other["manifest"]["run"]
    assert [facts["manifest"]["attempt"] for facts in (first, again, other)] == [1, 2, 1]
    sections = first["manifest"]["sections"]
    assert sections["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert sections["trainer"]["max_epochs"] == 1
    assert sections["strategy"]["micro_batches"] == 2
    assert sections["data"]["batch_size"] == 8
    assert "Linear" in sections["model"]["layers"]
    shown = table(again)
    assert f"name of the run       {first['manifest']['run']}, started 2 time(s)" in shown
    assert "optimizer             class ErrorFeedback(MuonAdamW)" in shown
    assert not list(tmp_path.rglob(".*")), "the lease was given up"


def test_under_a_delayed_gradient(pools: Pools, tmp_path: Path) -> None:
    run = run_of(tmp_path / "a", "delayed")
    pools.run(1, fit, run)
    pools.run(1, fit, after(run_of(tmp_path / "b", "delayed"), tmp_path / "a"))
    first, again = (describe(tmp_path / name / "step=4.ckpt")["manifest"] for name in "ab")
    assert (again["run"], first["attempt"], again["attempt"]) == (first["run"], 1, 2)
    assert first["sections"]["strategy"]["micro_batches"] == 2
    assert first["sections"]["data"]["rows"] == 37
    assert not list(tmp_path.rglob(".*")), "the lease was given up"


@pytest.mark.parametrize("strategy", ["async", "delayed"])
def test_a_resume_says_what_differs(pools: Pools, tmp_path: Path, strategy: str) -> None:
    ranks = 2 if strategy == "async" else 1
    run = run_of(tmp_path / "a", strategy)
    pools.run(ranks, fit, run)
    again = after(run_of(tmp_path / "b", strategy), tmp_path / "a")
    (warned, said), *_ = pools.run(ranks, fit_and_read, again)
    assert not [text for text in (*warned, *said) if "checkpoint's values" in text or "goes on with" in text]
    clipped = {"gradient_clip_val": 0.25}
    changed = replace(again, module=OtherRate, dropout=0.3, trainer=again.trainer | clipped)
    (warned, said), *_ = pools.run(ranks, fit_and_read, changed)
    told = next(text for text in warned if "the checkpoint's values go on" in text)
    assert "optimizer's muon: lr=0.5 (it was 0.02), optimizer's adamw: lr=0.5 (it was 0.02)" in told
    assert "strength" not in told
    model = next(text for text in warned if "go on in another model" in text)
    assert "Dropout(p=0.3" in model
    asked = next(text for text in said if "goes on with" in text)
    assert "trainer gradient_clip_val=0.25 (it was 0.5)" in asked
    assert "optimizer ErrorFeedback: strength=0.5 (it was 1.0)" in asked


def test_a_checkpoint_from_before_there_was_a_manifest(pools: Pools, tmp_path: Path) -> None:
    run = run_of(tmp_path / "a")
    pools.run(2, fit, run)
    content = load(tmp_path / "a" / "step=2.ckpt")
    del content["pipeline"]["manifest"]
    torch.save(content, tmp_path / "old.ckpt")
    pools.run(2, fit, replace(run_of(tmp_path / "b"), ckpt_path=str(tmp_path / "old.ckpt")))
    assert describe(tmp_path / "old.ckpt")["manifest"] is None
    assert "name of the run" not in table(describe(tmp_path / "old.ckpt"))


def fit_impatiently(run: Run) -> None:
    patience, lease.PATIENCE_SECONDS = lease.PATIENCE_SECONDS, 0.2
    try:
        fit(run)
    finally:
        lease.PATIENCE_SECONDS = patience


@pytest.mark.parametrize("options", [{}, {"state_dict_type": "sharded"}, {"async_checkpoints": True}])
@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_of_a_run_that_lives(pools: Pools, tmp_path: Path, options: dict[str, Any], is_link: bool) -> None:
    own, folder = Leases(), tmp_path / "run"
    (tmp_path / "elsewhere" if is_link else folder).mkdir()
    if is_link:
        folder.symlink_to(tmp_path / "elsewhere")
    own.begin({"run": "3f2a"}, [folder])
    try:
        outcomes = pools.outcomes(2, fit_impatiently, run_of(folder, **options))
    finally:
        own.end()
    assert {outcome.error for outcome in outcomes} <= {"StorageError", "OtherStageFailedError"}
    for outcome in outcomes:
        assert f"run 3f2a, host {os.uname().nodename}, process {os.getpid()}" in outcome.message
    assert not list(folder.glob("*.ckpt"))


@pytest.mark.parametrize("changed", [{"fast_dev_run": 2}, {}], ids=["fast_dev_run", "save_top_k=0"])
def test_who_saves_nothing_takes_no_folder(changed: dict[str, Any], pools: Pools, tmp_path: Path) -> None:
    """Beside a run of the same recipe."""
    own = Leases()
    own.begin({"run": "3f2a"}, [tmp_path])
    run = run_of(tmp_path)
    callbacks = run.callbacks if changed else ((ModelCheckpoint, {"dirpath": tmp_path, "save_top_k": 0}),)
    try:
        pools.run(2, fit_impatiently, replace(run, callbacks=callbacks, trainer={**run.trainer, **changed}))
    finally:
        own.end()
    assert not list(tmp_path.glob("*.ckpt"))


def test_plain_values() -> None:
    manifest = Manifest()
    nothing = object()
    kept = manifest.keep(
        "x", {"tensor": torch.tensor(0.5), "many": torch.ones(2), "f": nothing, "t": (1, nothing, "a")}
    )
    assert kept == {"tensor": 0.5, "t": [1, "a"]}
    assert Manifest.of_plain(manifest.as_plain()) == manifest
    assert Manifest.of_plain({"sections": 3}) is None
    read = Manifest.of_plain({"sections": {"x": {"many": torch.ones(2), 3: b"a", "a": 1}}})
    assert read is not None
    assert read.sections == {"x": {"a": 1}}
    long, other = (manifest.keep("x", {"a": "line\n" * 20_000 + end})["a"] for end in ("a", "b"))
    assert len(long) < 70_000
    assert long != other
    assert Manifest.of_plain(None) is None
    assert plain({1: float("inf")}) == {"1": float("inf")}


class Unreadable(dict[str, Any]):
    """Looks its values up, and finds none."""

    def items(self) -> Any:
        raise LookupError("???")


def test_values_of_other_types_become_pythons_own() -> None:
    """A checkpoint is read by what knows no others."""
    given = [np.float64(0.5), np.float32(0.5), np.int64(3), np.bool_(True), np.str_("a"), [np.float64(0.5)]]
    assert [type(value) for value in plain(given)] == [float, float, int, bool, str, list]
    holds_itself: dict[str, Any] = {"a": 1}
    holds_itself["it"] = holds_itself
    kept = Manifest().keep("x", {"loop": holds_itself, "lookup": Unreadable(a=1), "z": torch.tensor(1j), "w": 1j})
    assert kept["loop"]["it"]["it"]["a"] == 1
    assert kept.keys() == {"loop"}
    json.dumps(kept)


def test_a_hyper_parameter_of_numpy(pools: Pools, tmp_path: Path) -> None:
    run = replace(run_of(tmp_path), module=OfNumpy)
    pools.run(2, fit, run)
    saved = load(tmp_path / "step=2.ckpt", weights_only=False)
    assert type(saved["hyper_parameters"]["rate"]) is np.float64
    assert type(saved[PIPELINE]["manifest"]["sections"]["hyper-parameters"]["rate"]) is float


def test_folders_of_callbacks_that_save(tmp_path: Path) -> None:
    """A folder into which nothing is written need not be writable, nor anybody's own."""
    keeping: list[Any] = [{"save_top_k": 0}, {"save_top_k": 0, "save_last": True}, {"save_top_k": 1}]
    saving = []
    for number, options in enumerate(keeping):
        (tmp_path / str(number)).mkdir()
        saving.append(ModelCheckpoint(tmp_path / str(number), every_n_epochs=number + 1, **options))
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=list(saving))
    assert {folder.name for folder in checkpoint_folders(trainer)} == {"1", "2"}


class OfNumpy(ResumableNet):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.save_hyperparameters({"rate": np.float64(0.5)})


def test_differences() -> None:
    assert list(changes({"a": 1, "b": None, "c": [1]}, {"a": 1, "b": 0.5, "d": 3})) == [("b", "None", "0.5")]
    assert in_words(["x\n a\n b", "x\n c\n b", "x"]) == ["'a'", "'c'", "''"]

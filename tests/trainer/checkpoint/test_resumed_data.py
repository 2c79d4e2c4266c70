"""A run that goes on in the middle of an epoch goes on in the same data, wherever it lies, or is refused."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning_utilities.core import rank_zero
from torch.utils.data import Dataset

from lightning_asyncpp.trainer.checkpoint.progress import PROGRESS
from tests.trainer.checkpoint.resumable import NumberedSamples, fit_showing, write_litdata
from tests.trainer.checkpoint.test_exact_resume import TWO_EPOCHS, check, run_of, saving_after
from tests.trainer.checkpoint.test_resumed_loaders import Paired
from tests.trainer.pool import Pools
from tests.trainer.reference import assert_equal_weights, joined_weights
from tests.trainer.runs import Run

MID_EPOCH, END = 3, 5
SAID = "{}, and the checkpoint was written with {}"


class OtherSamples(NumberedSamples):
    """As many, with other values."""

    def __init__(self, count: int, noisy: bool) -> None:
        super().__init__(count, noisy)
        self.samples.x = self.samples.x + 1


class Elsewhere(Dataset):
    """Knows how many there are; the files are on another machine."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


def not_in_the_middle(samples: Callable[[int, bool], Dataset], count: int, noisy: bool) -> Dataset:
    return Elsewhere(count) if torch.distributed.get_rank() == 1 else samples(count, noisy)


def fit_noting(
    run: Run, kind: str, folder: str, samples: Callable[[int, bool], Dataset] = NumberedSamples, **how: Any
) -> dict[str, Any]:
    """Train, and report what was warned of and told, too."""
    notes: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: notes.append(record.getMessage())  # type: ignore[method-assign]
    rank_zero.log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = fit_showing(run, kind, folder, samples=samples, **how)
    finally:
        rank_zero.log.removeHandler(handler)
    return found | {"warned": [str(warning.message) for warning in caught], "told": notes}


CHANGES: dict[str, tuple[dict[str, Any], Any, list[str]]] = {
    "batch size": ({"batch_size": 14}, NumberedSamples, [SAID.format("batch_size=14", 8)]),
    "seed": ({"seed": 6}, NumberedSamples, [SAID.format("seed=6", 5)]),
    "rows": ({"samples": 29}, NumberedSamples, [SAID.format("rows=29", 37), "other training data (contents="]),
    "contents": ({}, OtherSamples, ["other training data (contents="]),
    "all": (
        {"samples": 45, "batch_size": 9, "seed": 6},
        OtherSamples,
        [SAID.format("rows=45", 37), SAID.format("batch_size=9", 8), SAID.format("seed=6", 5), "(contents="],
    ),
}


# Where they are told one from another, all are tests by default; elsewhere some of them.
FEW_CHANGES = [pytest.param(c, marks=[] if c in ("contents", "all") else [pytest.mark.slow]) for c in CHANGES]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, pools: Pools) -> Callable[[str, int], tuple[Run, Path]]:
    """Runs with a checkpoint in mid-epoch and one of an epoch's end, by kind and number of stages; each made once."""
    made: dict[tuple[str, int], tuple[Run, Path]] = {}

    def make(kind: str, stages: int) -> tuple[Run, Path]:
        if (kind, stages) not in made:
            folder = tmp_path_factory.mktemp("saved")
            write_litdata(folder / "data", 37)
            strategy = "default" if stages > 1 else "delayed"
            run = saving_after(run_of(folder, kind, TWO_EPOCHS, strategy=strategy), MID_EPOCH, END)
            pools.run(stages, fit_showing, run, kind, str(folder / "data"))
            made[kind, stages] = replace(run, callbacks=()), folder
        return made[kind, stages]

    return make


def at(run: Run, folder: Path, step: int, **changed: Any) -> Run:
    return replace(run, ckpt_path=str(folder / f"step={step}.ckpt"), **changed)


@pytest.mark.parametrize("stages", [3, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_other_data_in_mid_epoch_is_refused(change: str, stages: int, saved: Any, pools: Pools) -> None:
    """Under a pipeline and under delayed_gradient, whose sampler is the loader's own, without a seed."""
    changed, samples, texts = CHANGES[change]
    if stages == 1 and change == "seed":
        pytest.skip("its order goes on from random numbers of the checkpoint")
    run, folder = saved("stateful", stages)
    again = at(run, folder, MID_EPOCH, **changed)
    for outcome in pools.outcomes(stages, partial(fit_noting, samples=samples), again, "stateful", ""):
        assert outcome.error == "ConfigurationError"
        for text in texts:
            assert text in outcome.message or (stages == 1 and "seed" in text), outcome.message
        assert "after batch 3 of an epoch" in outcome.message
        assert "inexact_resume=True" in outcome.message


@pytest.mark.parametrize("change", FEW_CHANGES)
def test_other_data_in_mid_epoch_can_be_accepted(change: str, saved: Any, pools: Pools) -> None:
    changed, samples, texts = CHANGES[change]
    run, folder = saved("stateful", 3)
    again = at(run, folder, MID_EPOCH, options={"inexact_resume": True}, **changed)
    found = pools.run(3, partial(fit_noting, samples=samples), again, "stateful", "")
    warned = [text for text in found[0]["warned"] if text.startswith("inexact_resume=True: the rest of the run is not")]
    assert len(warned) == 1
    assert all(text in warned[0] for text in texts)
    assert not any("inexact_resume" in text for text in found[1]["warned"])
    assert len(found[0]["steps"]) > 0


@pytest.mark.parametrize("change", FEW_CHANGES)
@pytest.mark.parametrize("stages", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_other_data_at_an_epochs_end_is_told(change: str, stages: int, saved: Any, pools: Pools) -> None:
    """And is what the next epoch reads, whole."""
    changed, samples, texts = CHANGES[change]
    run, folder = saved("stateful", stages)
    again = at(run, folder, END, **changed)
    found = pools.run(stages, partial(fit_noting, samples=samples), again, "stateful", "")
    told = [text for text in found[0]["told"] if text.startswith("The next epoch is not read as the last one was: ")]
    if stages == 1 and change == "seed":
        assert told == []
    else:
        assert len(told) == 1
        assert all(text in told[0] for text in texts if stages > 1 or "seed" not in text)
    read = [number for batch in found[0]["numbers"] for number in batch]
    assert sorted(set(read)) == list(range(again.samples))
    assert "inexact" not in " ".join(found[0]["warned"])


@pytest.mark.parametrize("stages", [2, 1])
def test_moved_data_is_the_same_data(stages: int, saved: Any, pools: Pools, tmp_path: Path) -> None:
    """litdata compares paths: the contents decide instead."""
    run, folder = saved("litdata", stages)
    moved = shutil.copytree(folder / "data", tmp_path / "elsewhere")
    again = at(run, folder, MID_EPOCH)
    here = pools.run(stages, fit_noting, again, "litdata", str(folder / "data"))
    there = pools.run(stages, fit_noting, again, "litdata", str(moved))
    assert [found["numbers"] for found in there] == [found["numbers"] for found in here]
    assert there[0]["records"] == here[0]["records"]
    assert_equal_weights(joined_weights(there, stages), joined_weights(here, stages))
    assert not any("inexact" in text for text in there[0]["warned"])


@pytest.mark.parametrize("accepts", [False, True])
@pytest.mark.parametrize(
    ("change", "text"),
    [("batch size", "batch_size=14, and"), ("rows", "other training data (index="), ("values", "data (chunks=")],
)
def test_other_tokens_under_the_same_path(
    change: str, text: str, accepts: bool, saved: Any, pools: Pools, tmp_path: Path
) -> None:
    """Where litdata cannot go on in them, it begins their epoch anew."""
    run, folder = saved("litdata", 2)
    data = Path(shutil.copytree(folder / "data", tmp_path / "data"))
    if change == "rows":
        shutil.rmtree(data)
        write_litdata(data, 20)
    elif change == "values":
        for chunk in data.glob("chunk-*"):
            content = bytearray(chunk.read_bytes())
            content[-3] ^= 1  # of a number
            chunk.write_bytes(content)
    options = {"options": {"inexact_resume": True}} if accepts else {}
    again = at(run, folder, MID_EPOCH, **options, **({"batch_size": 14} if change == "batch size" else {}))
    for outcome in pools.outcomes(2, fit_noting, again, "litdata", str(data)):
        if accepts:
            assert not outcome.error, outcome.trace
        else:
            assert outcome.error == "ConfigurationError"
            assert text in outcome.message
            assert "inexact_resume=True" in outcome.message


def test_what_the_middle_stage_cannot_know(pools: Pools, tmp_path: Path) -> None:
    """All ranks are told by those that have the data, and nobody is kept waiting."""
    run = run_of(tmp_path, "stateful", TWO_EPOCHS)
    fit = partial(fit_showing, samples=partial(not_in_the_middle, NumberedSamples))
    check(pools, run, "stateful", tmp_path, [MID_EPOCH], 3, fit)
    again = replace(run, callbacks=(), ckpt_path=str(tmp_path / f"step={MID_EPOCH}.ckpt"))
    changed = partial(fit_showing, samples=partial(not_in_the_middle, OtherSamples))
    for outcome in pools.outcomes(3, changed, again, "stateful", ""):
        assert outcome.error == "ConfigurationError"
        assert "other training data (contents=" in outcome.message


def test_the_loader_among_several_is_named(pools: Pools, tmp_path: Path) -> None:
    fit = partial(fit_showing, make=Paired)
    run = saving_after(run_of(tmp_path, "two stateful", TWO_EPOCHS), MID_EPOCH)
    pools.run(2, fit, run, "two stateful", "")
    again = replace(run, callbacks=(), ckpt_path=str(tmp_path / f"step={MID_EPOCH}.ckpt"))
    for outcome in pools.outcomes(2, fit, replace(again, samples=45), "two stateful", ""):
        assert "training loader 0: rows=45, and the checkpoint was written with 37" in outcome.message
        assert "training loader 1" not in outcome.message


class AsOfAnOlderRelease(L.Callback):
    """Takes what says which data was read out of a checkpoint that is loaded."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        load = trainer.strategy.progress.resume  # type: ignore[attr-defined]

        def resume(state: Any, *more: Any) -> None:
            for loader in state["loaders"]:
                loader.pop("identity")
            load(state, *more)

        trainer.strategy.progress.resume = resume  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["stateful", "litdata"])
def test_checkpoints_of_older_releases(kind: str, saved: Any, pools: Pools, tmp_path: Path) -> None:
    """Nothing is compared, but the path of litdata's data if nothing is there any more."""
    run, folder = saved(kind, 2)
    old = at(run, folder, MID_EPOCH, callbacks=((AsOfAnOlderRelease, {}),))
    data = folder / "data"
    if kind == "stateful":
        pools.run(2, partial(fit_showing, samples=OtherSamples), old, kind, "")
        return
    here = pools.run(2, fit_showing, old, kind, str(data))
    moved = Path(shutil.copytree(data, tmp_path / "moved"))
    there = pools.run(2, fit_showing, old, kind, str(moved))  # the old ones are still there, and the same
    assert there[0]["numbers"] == here[0]["numbers"]
    aside = data.rename(tmp_path / "aside")
    try:
        for outcome in pools.outcomes(2, fit_showing, old, kind, str(moved)):
            assert outcome.error == "ConfigurationError"
            assert f"is read from {moved}, and the checkpoint" in outcome.message
            assert f"by the place alone: {data}" in outcome.message
        accepting = replace(old, options={"inexact_resume": True})
        accepted = pools.run(2, fit_showing, accepting, kind, str(moved))
        assert accepted[0]["numbers"] == here[0]["numbers"]
    finally:
        aside.rename(data)


def test_what_a_checkpoint_keeps_of_it_is_plain(saved: Any) -> None:
    _, folder = saved("stateful", 3)
    content = torch.load(folder / f"step={MID_EPOCH}.ckpt", weights_only=True)
    states = content["async_pipeline"][PROGRESS] if "async_pipeline" in content else content["pipeline"][PROGRESS]
    identities = [state["loaders"][0]["identity"] for state in states]
    assert identities[0] == identities[1] == identities[2]
    assert identities[0]["rows"] == 37
    assert all(isinstance(value, (str, int, float, bool, type(None))) for value in identities[0].values())

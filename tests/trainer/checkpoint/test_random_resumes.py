"""Chains of resumes, drawn at random: whatever the pipelines were in between, the end is the uninterrupted run's.

pytest -m slow tests/trainer/checkpoint/test_random_resumes.py      # 150 chains of pipelines, 50 in one process
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.trainer.checkpoint.resumable import write_litdata
from tests.trainer.pool import Pools
from tests.trainer.random_runs import Chain, Leg, chains, emulated_chains
from tests.trainer.random_runs_fit import fit_drawn
from tests.trainer.reference import assert_equal_weights

Results = list[dict[str, Any]]


def drawn(examples: int) -> settings:
    """No shrinking: an example takes seconds."""
    return settings(
        max_examples=examples, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip


def check(pools: Pools, chain: Chain, folder: Path) -> None:
    """Every leg does the rest of the one before it; or the same as its reference."""
    write_litdata(folder / "data", chain.legs[0].run.samples)
    before = whole = train(pools, chain, chain.legs[0], folder / "0")
    if chain.twin is not None:
        twin = train(pools, chain, chain.twin, folder / "twin")
        assert_equal_weights(whole[0]["weights"], twin[0]["weights"])
        for name in ("losses", "records"):
            assert_same_rows(whole[0]["happened"][name], twin[0]["happened"][name], name)
    begun: str | None = None  # what the leg before went on from
    for number, leg in enumerate(chain.legs[1:], 1):
        saved = str(folder / str(number - 1) / f"step={leg.at}.ckpt")
        if leg.after_cut:
            saved = cut(pools, chain, chain.legs[number - 1], leg.at, folder / f"{number}-cut", begun)
        found = train(pools, chain, leg, folder / str(number), saved)
        if leg.reference is None:
            assert_same(found, whole, rest(before, before, leg.at, "after" if leg.after_cut else "at"))
        else:
            whole = train(pools, chain, leg.reference, folder / f"{number}-reference", saved)
            assert_same(found, whole, [result["happened"] for result in whole])
        before, begun = found, saved


def cut(pools: Pools, chain: Chain, leg: Leg, step: int, folder: Path, ckpt_path: str | None) -> str:
    """Run a leg as one that ends with a step; what it saved when it had ended is returned."""
    saving = ((ModelCheckpoint, {"save_last": True, "save_top_k": 0}),)
    run = replace(leg.run, callbacks=saving, trainer=leg.run.trainer | {"max_steps": step})
    train(pools, chain, replace(leg, run=run), folder, ckpt_path)
    return str(folder / "last.ckpt")


def train(pools: Pools, chain: Chain, leg: Leg, folder: Path, ckpt_path: str | None = None) -> Results:
    """Of the last stage of every replica: the one that knows what it was fed and what it lost."""
    callbacks = tuple((make, {"dirpath": folder} | arguments) for make, arguments in leg.run.callbacks)
    run = replace(leg.run, callbacks=callbacks, ckpt_path=ckpt_path)
    data = str(folder.parent / "data")
    return pools.run(leg.processes, fit_drawn, run, chain.loader, data, timeout=120.0)[:: leg.stages]


def rest(run: Results, saved: Results, step: int, since: str = "at") -> list[dict[str, Any]]:
    """What a run did after a step, of which another one that did the same saved a checkpoint.

    ``since`` is that checkpoint (``"at"``), or the batch ``"after"`` it.
    """
    return [
        {name: rows[by[since][step][name] :] for name, rows in result["happened"].items()}
        for result, by in zip(run, saved, strict=True)
    ]


def assert_same(found: Results, whole: Results, happened: list[dict[str, Any]]) -> None:
    for result, expected in zip(found, happened, strict=True):
        for name, rows in expected.items():
            assert_same_rows(result["happened"][name], rows, name)
    assert_equal_weights(found[0]["weights"], whole[0]["weights"])
    for name in ("metrics", "epoch", "step"):
        assert repr(found[0][name]) == repr(whole[0][name]), name


def assert_same_rows(found: list[Any], expected: list[Any], name: str) -> None:
    """NaN is equal to NaN, and names may have been logged in another order."""
    pairs = enumerate(zip_longest(map(_in_order, found), map(_in_order, expected)))
    different = [f"{number}: {one}, expected {other}" for number, (one, other) in pairs if one != other]
    assert not different, "\n".join([f"{name}, {len(found)} rows, expected {len(expected)}", *different[:3]])


@drawn(1)
@given(chain=chains())
def test_the_end_is_the_uninterrupted_runs(
    pools: Pools, tmp_path_factory: pytest.TempPathFactory, chain: Chain
) -> None:
    check(pools, chain, tmp_path_factory.mktemp("chain"))


@drawn(1)
@given(chain=emulated_chains())
def test_so_it_is_in_one_process(pools: Pools, tmp_path_factory: pytest.TempPathFactory, chain: Chain) -> None:
    check(pools, chain, tmp_path_factory.mktemp("chain"))


@pytest.mark.slow
@pytest.mark.timeout(5000)
@drawn(150)
@given(chain=chains(workers=True))
def test_more_pipelines(pools: Pools, tmp_path_factory: pytest.TempPathFactory, chain: Chain) -> None:
    check(pools, chain, tmp_path_factory.mktemp("chain"))


@pytest.mark.slow
@pytest.mark.timeout(2000)
@drawn(50)
@given(chain=emulated_chains())
def test_more_in_one_process(pools: Pools, tmp_path_factory: pytest.TempPathFactory, chain: Chain) -> None:
    check(pools, chain, tmp_path_factory.mktemp("chain"))


def _in_order(row: Any) -> str:
    parts = row if isinstance(row, tuple) else (row,)
    return repr([sorted(part.items()) if isinstance(part, dict) else part for part in parts])

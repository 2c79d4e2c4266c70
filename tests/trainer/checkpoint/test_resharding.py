"""A checkpoint goes on with other stages, cuts, replicas and delays than those that wrote it, in either form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F

from lightning_asyncpp.storage import load
from tests.helpers.oracle import assert_equal_weights, joined_weights, mini_batches_of, oracle, plain_module
from tests.helpers.pool import Pools
from tests.helpers.resumable import RESUMABLE_RUN, RESUMABLE_TRAINER, ResumableNet
from tests.helpers.same import assert_same
from tests.helpers.trainer import Run, arrays, fit

FOUR = {"microbatches": 4}
SHARDED = {"state_dict_type": "sharded"}
BEHIND = {"async_checkpoints": True}


def run_of(folder: Path, epochs: int = 2, **options: Any) -> Run:
    saving = (ModelCheckpoint, {"dirpath": folder, "save_top_k": -1, "filename": "{step}", "every_n_train_steps": 2})
    return replace(
        RESUMABLE_RUN,
        module=ResumableNet,
        callbacks=(saving,),
        options=FOUR | options,
        trainer=RESUMABLE_TRAINER | {"max_epochs": epochs},
    )


def resumed(pools: Pools, stages: int, run: Run, folder: Path, step: int, **options: Any) -> dict[str, Any]:
    run = replace(run, callbacks=(), options=FOUR | options, ckpt_path=str(folder / f"step={step}.ckpt"))
    return joined_weights(pools.run(stages * options.get("data_parallel_size", 1), fit, run), stages)


@pytest.mark.parametrize(
    ("stages", "options", "others"),
    [
        (3, {}, [(2, {})]),
        pytest.param(3, {}, [(3, {"partition": [1, 6, 2]})], marks=pytest.mark.slow),
        (2, SHARDED | BEHIND, [(3, {}), (1, SHARDED)]),
        pytest.param(3, {}, [(1, {})], marks=pytest.mark.slow),
        pytest.param(1, SHARDED, [(2, {}), (4, {})], marks=pytest.mark.slow),
        pytest.param(4, BEHIND, [(1, {}), (2, SHARDED), (3, {})], marks=pytest.mark.slow),
        pytest.param(4, SHARDED, [(4, {"partition": [1, 2, 2, 4]}), (3, {})], marks=pytest.mark.slow),
    ],
)
def test_other_stages(pools: Pools, stages: int, options: dict[str, Any], others: list[Any], tmp_path: Path) -> None:
    """Bitwise: Error Feedback, Muon's momentum and the older weights come along, in mid-epoch."""
    run = run_of(tmp_path, epochs=3, **options)
    whole = joined_weights(pools.run(stages, fit, run), stages)
    for number, (other, changed) in enumerate(others):
        step = (4, 10, 14)[number]
        assert_equal_weights(resumed(pools, other, run, tmp_path, step, **changed), whole)


def test_the_least_staleness_with_other_stages_and_slack(pools: Pools, tmp_path: Path) -> None:
    """Whatever the run goes on as, it is the run of that in one process, from the same checkpoint; or another cut's."""
    run = run_of(tmp_path, staleness="least", partition="uniform")
    whole = joined_weights(pools.run(3, fit, run), 3)
    assert_equal_weights(resumed(pools, 3, run, tmp_path, 4, staleness="least", partition="uniform"), whole)
    others: list[dict[str, Any]] = [{"slack": 1}, {"slack": "exact"}, {"lookahead": 1}]
    ends = [resumed(pools, 2, run, tmp_path, 4, staleness="least", **other) for other in others]
    assert all(sorted(end) == sorted(whole) for end in ends)
    first = next(iter(whole))
    assert len({end[first].tobytes() for end in [whole, *ends]}) == 4, "each is another trajectory"
    assert_equal_weights(resumed(pools, 2, run, tmp_path, 4), resumed(pools, 3, run, tmp_path, 4))


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_from_synchronous_to_asynchronous(pools: Pools, stages: int, tmp_path: Path) -> None:
    """W_{t-1} = W_t to begin with."""
    run = replace(run_of(tmp_path), strategy="sync")
    pools.run(2, fit, run)
    expected = oracle(replace(run, strategy="async"), 4, list(mini_batches_of(run, 2)), max_norm=0.5, start=4)[0]
    assert_equal_weights(resumed(pools, stages, replace(run, strategy="async"), tmp_path, 4), expected)


def test_from_asynchronous_to_synchronous(pools: Pools, tmp_path: Path) -> None:
    """The next mini-batch runs on the newest weights, without delay."""
    run = replace(run_of(tmp_path, **SHARDED), dropout=0.0, scheduler="")
    pools.run(3, fit, run)
    continued = replace(run, strategy="sync", callbacks=(), ckpt_path=str(tmp_path / "step=4.ckpt"), options=FOUR)
    results = {stages: pools.run(stages, fit, continued) for stages in (1, 2)}
    assert_equal_weights(joined_weights(results[2], 2), joined_weights(results[1], 1))
    batches = list(mini_batches_of(run, 3))
    module = plain_module(run, oracle(run, 4, batches[:4], max_norm=0.5)[0])
    (fifth,) = batches[4]
    expected = float(F.mse_loss(module.model(fifth["x"]), fifth["y"]).detach())
    assert results[1][0]["losses"][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_other_replicas(pools: Pools, before: int, after: int, tmp_path: Path) -> None:
    """At an epoch's end; the same with any number of stages."""
    run = replace(run_of(tmp_path, data_parallel_size=before), module=RESUMABLE_RUN.module, shuffle=True, samples=40)
    saving = (ModelCheckpoint, {"dirpath": tmp_path, "save_top_k": -1, "filename": "{step}", "every_n_epochs": 1})
    run = replace(run, callbacks=(saving,))
    pools.run(2 * before, fit, run)
    first = min(int(path.stem.partition("=")[2]) for path in tmp_path.glob("*.ckpt"))
    two = resumed(pools, 2, run, tmp_path, first, data_parallel_size=after)
    one = resumed(pools, 1, run, tmp_path, first, data_parallel_size=after)
    assert_equal_weights(two, one)


def test_both_forms_hold_the_same(pools: Pools, tmp_path: Path) -> None:
    contents = {}
    for form, options in {"full": {}, "sharded": SHARDED, "behind": SHARDED | BEHIND}.items():
        run = run_of(tmp_path / form, **options)
        pools.run(2, fit, replace(run, trainer=RESUMABLE_TRAINER | {"max_epochs": 1}))
        load(tmp_path / form / "step=4.ckpt")
        contents[form] = load(tmp_path / form / "step=4.ckpt")
    for form in ("sharded", "behind"):
        assert contents[form].keys() == contents["full"].keys()
        assert_equal_weights(arrays(contents[form]["state_dict"]), arrays(contents["full"]["state_dict"]))
        assert_equal_weights(*(arrays(contents[f]["pipeline"]["older_weights"]) for f in (form, "full")))
        assert_same(contents[form]["loops"], contents["full"]["loops"])
        ((one,), (other,)) = (contents[f]["optimizer_states"] for f in (form, "full"))
        assert one["state"].keys() == other["state"].keys()
        for number, state in one["state"].items():
            assert_equal_weights(arrays(state), arrays(other["state"][number]))

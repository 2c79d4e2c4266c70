"""A checkpoint of either form can be resumed with other stages, partitions, replicas and delays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from lightning_asyncpp.cli import main
from lightning_asyncpp.storage import load
from tests.helpers.oracle import assert_equal_weights, joined_weights, mini_batches_of, oracle, plain_module
from tests.helpers.pool import Pools
from tests.helpers.resumable import ONE_PROCESS, RESUMABLE_RUN, RESUMABLE_TRAINER, OneProcess, ResumableNet, saving
from tests.helpers.trainer import Run, arrays, fit
from tests.storage.saves import assert_same

FOUR = {"microbatches": 4}


def run_of(folder: Path, **options: Any) -> Run:
    """Return a run of two epochs of five batches, with a checkpoint after every second batch."""
    callbacks, trainer = (saving(folder, every_n_train_steps=2),), RESUMABLE_TRAINER | {"max_epochs": 2}
    return replace(RESUMABLE_RUN, module=ResumableNet, callbacks=callbacks, options=FOUR | options, trainer=trainer)


def trained(pools: Pools | OneProcess, stages: int, run: Run) -> dict[str, np.ndarray]:
    return joined_weights(pools.run(stages * run.options.get("data_parallel_size", 1), fit, run), stages)


def resumed(pools: Pools | OneProcess, stages: int, run: Run, step: int = 4, **changed: Any) -> dict[str, np.ndarray]:
    """Resume from a checkpoint that the run has written, and return the final weights."""
    path = run.callbacks[0][1]["dirpath"] / f"step={step}.ckpt"
    return trained(pools, stages, replace(run, callbacks=(), ckpt_path=str(path), options=FOUR | changed))


def test_other_stages_and_cuts(tmp_path: Path) -> None:
    """Resuming in mid-epoch is bitwise exact, with Error Feedback, Muon's momentum and the older weights."""
    run = run_of(tmp_path)
    whole = trained(ONE_PROCESS, 3, run)
    assert_equal_weights(resumed(ONE_PROCESS, 2, run), whole)
    assert_equal_weights(resumed(ONE_PROCESS, 4, run, 8, partition=[1, 2, 2, 4]), whole)


def test_the_least_staleness_with_other_stages_and_slack(tmp_path: Path) -> None:
    """The same options continue the same run; another partition, slack or lookahead gives another trajectory."""
    run = run_of(tmp_path, staleness="least", partition="uniform")
    whole = trained(ONE_PROCESS, 3, run)
    assert_equal_weights(resumed(ONE_PROCESS, 3, run, staleness="least", partition="uniform"), whole)
    others: list[dict[str, Any]] = [{"slack": 1}, {"slack": "exact"}, {"lookahead": 1}]
    ends = [resumed(ONE_PROCESS, 2, run, 8, staleness="least", **other) for other in others]
    assert all(sorted(end) == sorted(whole) for end in ends)
    first = next(iter(whole))
    assert len({end[first].tobytes() for end in [whole, *ends]}) == 4
    assert_equal_weights(resumed(ONE_PROCESS, 2, run, 8), resumed(ONE_PROCESS, 3, run, 8))


def test_from_synchronous_to_asynchronous(tmp_path: Path) -> None:
    """The asynchronous run starts with W_{t-1} = W_t."""
    run = replace(run_of(tmp_path), strategy="sync")
    trained(ONE_PROCESS, 2, run)
    run = replace(run, strategy="async")
    expected = oracle(run, 4, list(mini_batches_of(run, 2)), max_norm=0.5, start=4)[0]
    assert_equal_weights(resumed(ONE_PROCESS, 3, run), expected)


def test_from_asynchronous_to_synchronous(tmp_path: Path) -> None:
    """The first mini-batch after resuming runs on the newest weights, without delay."""
    run = replace(run_of(tmp_path), dropout=0.0, scheduler="")
    trained(ONE_PROCESS, 3, run)
    run = replace(run, strategy="sync", callbacks=(), ckpt_path=str(tmp_path / "step=4.ckpt"))
    results = {stages: ONE_PROCESS.run(stages, fit, run) for stages in (1, 2)}
    assert_equal_weights(joined_weights(results[2], 2), joined_weights(results[1], 1))
    batches = list(mini_batches_of(run, 1))
    module = plain_module(run, oracle(replace(run, strategy="async"), 4, batches[:4], max_norm=0.5)[0])
    (fifth,) = batches[4]
    expected = float(F.mse_loss(module.model(fifth["x"]), fifth["y"]).detach())
    assert results[1][0]["losses"][0] == pytest.approx(expected, rel=1e-5)


def test_other_replicas(pools: Pools, tmp_path: Path) -> None:
    """Two replicas can resume as one at an epoch's end, with the same result for any number of stages."""
    run = replace(run_of(tmp_path, data_parallel_size=2), module=RESUMABLE_RUN.module, samples=40, shuffle=True)
    run = replace(run, callbacks=(saving(tmp_path, every_n_epochs=1),))
    trained(pools, 2, run)
    assert_equal_weights(resumed(pools, 2, run, 3), resumed(ONE_PROCESS, 1, run, 3))


def command(*arguments: Any) -> None:
    main(["checkpoint", *map(str, arguments)])


class Saved(NamedTuple):
    """Two-stage run that wrote its checkpoints in parts in the background, one checkpoint, and the final weights."""

    run: Run
    parts: Path
    weights: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def saved(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    run = run_of(folder, state_dict_type="sharded", async_checkpoints=True)
    return Saved(run, folder / "step=4.ckpt", trained(pools, 2, run))


def test_parts_of_processes_hold_what_one_file_holds(saved: Saved, pools: Pools, tmp_path: Path) -> None:
    assert_equal_weights(trained(ONE_PROCESS, 2, run_of(tmp_path)), saved.weights)
    assert_equal_weights(resumed(pools, 3, saved.run), saved.weights)
    assert_equal_weights(resumed(ONE_PROCESS, 1, saved.run), saved.weights)
    one, other = load(tmp_path / "step=4.ckpt"), load(saved.parts)
    assert one.keys() == other.keys()
    assert_same(one["loops"], other["loops"])


def test_a_run_goes_on_from_the_other_form(saved: Saved, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    converted = tmp_path / "step=4.ckpt"
    command("convert", saved.parts, converted, "--to", "full")
    assert f"{converted}: full, " in capsys.readouterr().out
    assert converted.is_file()
    assert_equal_weights(resumed(ONE_PROCESS, 2, run_of(tmp_path)), saved.weights)
    assert list(load(saved.parts)) == list(load(converted))


def test_what_ranks_remember_is_written_once(saved: Saved) -> None:
    """Random states and metrics of all ranks are written once, by the first rank, which is the last stage."""
    first, last = (torch.load(path, weights_only=True) for path in sorted(saved.parts.glob("*.pt")))
    assert len(last["pipeline"]["progress"]) == 2, "of both ranks"
    assert "progress" not in first["pipeline"]
    assert first.keys() == {"state_dict", "optimizer_states", "pipeline"} < last.keys()


def test_weights_alone(saved: Saved, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    expected = {name.removeprefix("model."): tensor for name, tensor in load(saved.parts)["state_dict"].items()}
    for name in ("weights.safetensors", "weights.pt"):
        command("convert", saved.parts, tmp_path / name, "--to", "weights")
        found = load_file(tmp_path / name) if name.endswith("s") else torch.load(tmp_path / name, weights_only=True)
        assert_equal_weights(arrays(found), arrays(expected))
    capsys.readouterr()
    command("info", tmp_path / "weights.pt", "--json")
    assert json.loads(capsys.readouterr().out)["writer"] == "weights"


def test_info(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    command("info", saved.parts, "--json")
    facts = json.loads(capsys.readouterr().out)
    weights = sum(tensor.nbytes for tensor in load(saved.parts)["state_dict"].values())
    expected = {
        "form": "sharded", "writer": "Trainer", "global_step": 4, "epoch": 0, "num_stages": 2,
        "partition": [4, 5], "data_parallel_size": 1, "microbatches": 4, "delay": 1,
        "dtypes": {"float32": weights // 4}, "parameters": weights // 4,
    }  # fmt: skip
    assert expected.items() <= facts.items()
    assert facts["bytes_on_disk"] > 4 * weights
    command("info", saved.parts)
    assert "partition" in capsys.readouterr().out


def test_what_is_there_is_not_written_over(saved: Saved, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    taken, folder = tmp_path / "taken", tmp_path / "folder"
    taken.write_text("something")
    folder.mkdir()
    (folder / "file").touch()
    for place, force, says in (
        (taken, (), "exists already"),
        (folder, ("--force",), "a folder with other files (file)"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command("convert", saved.parts, place, "--to", "full", *force)
        assert says in capsys.readouterr().err
    assert taken.read_text() == "something"
    assert (folder / "file").exists()
    command("convert", saved.parts, taken, "--to", "full", "--force")
    command("convert", taken, taken, "--to", "full", "--force")
    load(taken)

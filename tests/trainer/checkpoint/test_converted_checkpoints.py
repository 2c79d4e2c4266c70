"""``asyncpp checkpoint``: what it says of checkpoints of real runs, and runs that go on from converted ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_asyncpp.cli import main
from lightning_asyncpp.storage import load
from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.trainer import arrays, fit
from tests.trainer.checkpoint.test_resharding import SHARDED, resumed, run_of

Command = Callable[..., str]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``asyncpp checkpoint`` and returns what it prints."""

    def run(*arguments: Any, code: int = 0) -> str:
        ended = 0
        try:
            main(["checkpoint", *map(str, arguments)])
        except SystemExit as end:
            ended = int(end.code or 0)
        printed = capsys.readouterr()
        assert ended == code, printed
        return printed.err if code == 2 else printed.out

    return run


@pytest.fixture(scope="module")
def saved(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of two stages in both forms, with what it came to."""
    folder = tmp_path_factory.mktemp("saved")
    results = pools.run(2, fit, run_of(folder / "full"))
    pools.run(
        2, fit, replace(run_of(folder / "sharded", **SHARDED), trainer=run_of(folder).trainer | {"max_epochs": 1})
    )
    return {"folder": folder, "weights": joined_weights(results, 2)}


def test_a_run_goes_on_from_the_other_form(
    saved: dict[str, Any], pools: Pools, command: Command, tmp_path: Path
) -> None:
    """What they hold is the same."""
    source, converted = saved["folder"] / "sharded/step=4.ckpt", tmp_path / "step=4.ckpt"
    assert f"{converted}: full, " in command("convert", source, converted, "--to", "full")
    assert converted.is_file()
    assert_equal_weights(resumed(pools, 2, run_of(tmp_path), tmp_path, 4), saved["weights"])
    assert list(load(source)) == list(load(converted))


def test_what_ranks_remember_is_written_once(saved: dict[str, Any]) -> None:
    """Their random numbers and metrics, by the first rank, which is the last stage."""
    folder = saved["folder"] / "sharded/step=4.ckpt"
    first, last = (torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt")))
    assert len(last["pipeline"]["progress"]) == 2, "of both ranks"
    assert "progress" not in first["pipeline"]
    assert first.keys() == {"state_dict", "optimizer_states", "pipeline"} < last.keys()


def test_weights_alone(saved: dict[str, Any], command: Command, tmp_path: Path) -> None:
    source = saved["folder"] / "sharded/step=4.ckpt"
    expected = {name.removeprefix("model."): tensor for name, tensor in load(source)["state_dict"].items()}
    assert all(name[0].isdigit() for name in expected)
    for name in ("weights.safetensors", "weights.pt"):
        command("convert", source, tmp_path / name, "--to", "weights")
        found = load_file(tmp_path / name) if name.endswith("s") else torch.load(tmp_path / name, weights_only=True)
        assert_equal_weights(arrays(found), arrays(expected))
    facts = json.loads(command("info", tmp_path / "weights.pt", "--json"))
    assert (facts["writer"], facts["parameters"]) == ("weights", 421)


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_info(form: str, saved: dict[str, Any], command: Command) -> None:
    path = saved["folder"] / form / "step=4.ckpt"
    facts = json.loads(command("info", path, "--json"))
    weights = sum(tensor.nbytes for tensor in load(path)["state_dict"].values())
    expected = {
        "form": form, "writer": "Trainer", "global_step": 4, "epoch": 0, "num_stages": 2,
        "partition": [4, 5], "data_parallel_size": 1, "microbatches": 4, "delay": 1,
        "dtypes": {"float32": weights // 4}, "parameters": weights // 4,
    }  # fmt: skip
    assert expected.items() <= facts.items()
    assert facts["bytes_on_disk"] > 4 * weights
    shown = command("info", path)
    lines = dict(line.split(maxsplit=1) for line in shown.splitlines())
    assert (lines["num_stages"], lines["partition"], lines["writer"]) == ("2", "[4, 5]", "Trainer")
    assert lines.get("files", "").count("-stage-") == (2 if form == "sharded" else 0)


def test_what_it_refuses(saved: dict[str, Any], command: Command, tmp_path: Path) -> None:
    source, taken = saved["folder"] / "full/step=4.ckpt", tmp_path / "taken"
    taken.write_text("something")
    error = command("convert", source, taken, "--to", "full", code=2)
    assert f"asyncpp checkpoint convert: error: {taken} exists already; name another, or give --force" in error
    assert taken.read_text() == "something"
    command("convert", source, taken, "--to", "full", "--force")
    load(taken)
    command("convert", taken, taken, "--to", "full", "--force")
    load(taken)
    for arguments, message in [
        (("--to", "zip"), "argument --to: invalid choice: 'zip'"),
        (("--to", "full", "--entry", "x"), "--entry x: only weights are taken from one entry"),
        (("--to", "weights", "--entry", "x"), "not one model called 'x'; its models are: state_dict"),
    ]:
        assert message in command("convert", source, tmp_path / "new", *arguments, code=2)
    for name in ("info",):
        assert "there is no checkpoint" in command(name, tmp_path / "absent", code=2 if name == "info" else 1)
    assert "invalid choice: 'remove'" in command("remove", source, code=2)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").touch()
    error = command("convert", source, tmp_path / "folder", "--to", "full", "--force", code=2)
    assert "holds something else (file)" in error
    assert os.listdir(tmp_path / "folder") == ["file"]


def test_fabrics_checkpoints(command: Command, tmp_path: Path) -> None:
    """Entries have the names that the user gave them."""
    model = {"weight": torch.ones(2, 3), "bias": torch.zeros(2).bfloat16()}
    optimizer = {
        "state": {0: {"exp_avg": torch.ones(2, 3), "previous_step": torch.ones(2, 3)}},
        "param_groups": [{"lr": 0.1, "params": [0, 1]}],
    }
    pipeline = {"num_stages": 2, "older_weights": {"weight": torch.ones(2, 3)}, "partition": [1, 1]}
    content = {"net": model, "other": {"w": torch.ones(1)}, "optimizer": optimizer, "pipeline": pipeline, "step": 7}
    torch.save(content, tmp_path / "x.pt")
    facts = json.loads(command("info", tmp_path / "x.pt", "--json"))
    assert (facts["writer"], facts["num_stages"], facts["parameters"]) == ("Fabric", 2, 9)
    error = command("convert", tmp_path / "x.pt", tmp_path / "w.pt", "--to", "weights", code=2)
    assert "its models are: net, other; name one: --entry NAME" in error
    command("convert", tmp_path / "x.pt", tmp_path / "w.pt", "--to", "weights", "--entry", "net")
    assert torch.load(tmp_path / "w.pt", weights_only=True).keys() == model.keys()

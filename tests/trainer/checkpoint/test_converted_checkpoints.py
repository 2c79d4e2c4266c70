"""``asyncpp checkpoint``: what it says of checkpoints of real runs, and runs that go on from converted ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_asyncpp.cli import main
from lightning_asyncpp.storage import load
from tests.helpers.oracle import assert_equal_weights
from tests.helpers.pool import Pools
from tests.helpers.resumable import ONE_PROCESS
from tests.helpers.trainer import arrays
from tests.trainer.checkpoint.test_resharding import SHARDED, resumed, run_of, trained

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
    """Parts that two stages wrote, and what they came to."""
    folder = tmp_path_factory.mktemp("saved")
    return {"parts": folder / "step=4.ckpt", "weights": trained(pools, 2, run_of(folder, **SHARDED))}


def test_a_run_goes_on_from_the_other_form(saved: dict[str, Any], command: Command, tmp_path: Path) -> None:
    """What they hold is the same."""
    converted = tmp_path / "step=4.ckpt"
    assert f"{converted}: full, " in command("convert", saved["parts"], converted, "--to", "full")
    assert converted.is_file()
    assert_equal_weights(resumed(ONE_PROCESS, 2, run_of(tmp_path)), saved["weights"])
    assert list(load(saved["parts"])) == list(load(converted))


def test_what_ranks_remember_is_written_once(saved: dict[str, Any]) -> None:
    """Their random numbers and metrics, by the first rank, which is the last stage."""
    first, last = (torch.load(path, weights_only=True) for path in sorted(saved["parts"].glob("*.pt")))
    assert len(last["pipeline"]["progress"]) == 2, "of both ranks"
    assert "progress" not in first["pipeline"]
    assert first.keys() == {"state_dict", "optimizer_states", "pipeline"} < last.keys()


def test_weights_alone(saved: dict[str, Any], command: Command, tmp_path: Path) -> None:
    expected = {name.removeprefix("model."): tensor for name, tensor in load(saved["parts"])["state_dict"].items()}
    for name in ("weights.safetensors", "weights.pt"):
        command("convert", saved["parts"], tmp_path / name, "--to", "weights")
        found = load_file(tmp_path / name) if name.endswith("s") else torch.load(tmp_path / name, weights_only=True)
        assert_equal_weights(arrays(found), arrays(expected))
    facts = json.loads(command("info", tmp_path / "weights.pt", "--json"))
    assert (facts["writer"], facts["parameters"]) == ("weights", 421)


def test_info(saved: dict[str, Any], command: Command) -> None:
    facts = json.loads(command("info", saved["parts"], "--json"))
    weights = sum(tensor.nbytes for tensor in load(saved["parts"])["state_dict"].values())
    expected = {
        "form": "sharded", "writer": "Trainer", "global_step": 4, "epoch": 0, "num_stages": 2,
        "partition": [4, 5], "data_parallel_size": 1, "microbatches": 4, "delay": 1,
        "dtypes": {"float32": weights // 4}, "parameters": weights // 4,
    }  # fmt: skip
    assert expected.items() <= facts.items()
    assert facts["bytes_on_disk"] > 4 * weights
    assert "partition" in command("info", saved["parts"])


def test_what_is_there_is_not_written_over(saved: dict[str, Any], command: Command, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("something")
    assert "exists already" in command("convert", saved["parts"], taken, "--to", "full", code=2)
    assert taken.read_text() == "something"
    command("convert", saved["parts"], taken, "--to", "full", "--force")
    command("convert", taken, taken, "--to", "full", "--force")
    load(taken)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").touch()
    error = command("convert", saved["parts"], tmp_path / "folder", "--to", "full", "--force", code=2)
    assert "with other files (file)" in error
    assert (tmp_path / "folder/file").exists()

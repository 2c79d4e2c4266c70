"""Tiny runs of ``asyncpp bench optimizer``: what it prints and writes, not how fast anything is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_asyncpp.tools.bench import optimizer
from lightning_asyncpp.tools.bench.bench import main
from lightning_asyncpp.tools.bench.names import LIBRARY, OPTIMIZERS, OURS, TORCH, TORCH_FUSED
from lightning_asyncpp.tools.bench.optimizer import Difference, Report
from lightning_asyncpp.tools.bench.optimizer_contenders import StageShape, make_gradients

SIZES = ["--layers", "1", "--width", "32", "--heads", "4", "--kv-heads", "2", "--mlp", "96", "--context", "8"]
TINY = [*SIZES, "--repeats", "2", "--threads", "1"]
TINY_SHAPE = StageShape(1, 32, 4, 2, 96, 20, 8)


@pytest.mark.parametrize("vocab", [0, 20])
def test_prints_a_table_and_writes_json(vocab: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    systems = [OURS, TORCH, TORCH_FUSED]
    main(["optimizer", *TINY, "--vocab", str(vocab), "--systems", *systems, "--json", str(file)])
    printed = capsys.readouterr().out
    assert all(OPTIMIZERS[system] in printed for system in systems)
    assert "Error Feedback adds" in printed
    assert "NOT EQUAL" not in printed
    results = json.loads(file.read_text())
    assert list(results["systems"]) == systems
    assert results["systems"][TORCH]["speed_over_torch"]["median"] == 1.0
    assert results["systems"][OURS]["difference"]["relative"] <= 0.02
    shares = list(results["error_feedback"]["share_of_training_step"].values())
    assert shares == sorted(shares, reverse=True)
    assert {"cpu_count", "torch", "gpu"} <= set(results["machine"])


WITHOUT_LIBRARY = f"""
import sys
sys.modules["pytorch_optimizer"] = None  # its import fails
from lightning_asyncpp.tools.bench.optimizer import main
main({TINY} + ["--vocab", "0", "--error-feedback", "false", "--systems", "torch", "pytorch_optimizer"])
"""


@pytest.mark.slow
def test_a_missing_package_is_named_and_the_rest_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_LIBRARY], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "left out:" in done.stdout
    assert "pip install pytorch_optimizer" in done.stdout
    assert "Error Feedback" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "ours"], "--systems lacks 'torch'"),
        (["--systems", "torch", "adam"], "there are ours"),
        (["--heads", "5"], "must divide dim=32"),
        (["--repeats", "0"], "repeats"),
        (["--device", "cuda"], "torch sees no GPU"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["optimizer", *TINY, *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_systems_take_turns_in_changing_order() -> None:
    order: list[str] = []
    times = optimizer.measure({name: lambda name=name: order.append(name) for name in "ab"}, 3, torch.device("cpu"))
    assert order == [*"ba", *"ab", *"ba", *"ab"]
    assert {name: len(taken) for name, taken in times.items()} == {"a": 3, "b": 3}


def test_gradients_do_not_depend_on_the_call_and_fall_off() -> None:
    first, second = (make_gradients(TINY_SHAPE.build(torch.device("cpu"))) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    singular = torch.linalg.svdvals(next(g for g in first if g.shape == (32, 32)))
    assert singular[0] > 20 * singular.median()


def test_differences_are_relative_to_the_step() -> None:
    start, reference = [torch.zeros(4)], [torch.full((4,), 0.1)]
    difference = Difference.between(start, [torch.full((4,), 0.11)], reference, must_be_equal=True)
    assert difference.relative == pytest.approx(0.1)
    assert "NOT EQUAL" in difference.text()
    assert "= to rounding" in Difference.between(start, reference, reference, must_be_equal=True).text()


def test_shares_of_error_feedback() -> None:
    times = {OURS: [1.0, 1.0], TORCH: [2.0, 2.0], "feedback": [0.1, 0.1], "work": [0.5, 0.5]}
    report = Report({"device": "cpu", "layers": 1, "vocab": 0}, 1, times, {}, {}, 100)
    facts = report.feedback()
    assert facts is not None
    assert facts["share_of_step"] == pytest.approx(0.1)
    assert facts["share_of_training_step"][4096] == pytest.approx(0.1 / (1 + 4096 * 0.005))
    assert facts["tokens_per_update_for_2_percent"] == 800  # 0.1 / (1 + 800 * 0.005) = 0.02
    assert report.speed(OURS).median == 2.0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pytorch_optimizer") is None, reason="pytorch_optimizer is not installed")
def test_the_library_agrees(tmp_path: Path) -> None:
    # In a process of its own: its import makes short names on the command line ambiguous.
    file = tmp_path / "out.json"
    program = "import sys; from lightning_asyncpp.tools.bench.optimizer import main; main(sys.argv[1:])"
    arguments = [*TINY, "--vocab", "20", "--systems", TORCH, LIBRARY, "--json", str(file)]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True, timeout=200)
    assert json.loads(file.read_text())["systems"][LIBRARY]["difference"]["relative"] <= 0.02

"""``asyncpp doctor``: the report of this machine, and what it says where a training fails or differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_asyncpp.core.schedule import StalenessRule
from lightning_asyncpp.tools import doctor
from lightning_asyncpp.tools.doctor import Found, expected, largest_difference

FOUND = Found("tensors travel over sockets", 3.0, 0.0, "gloo")


def test_two_stages_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main([])
    printed = capsys.readouterr().out
    assert "equal to the reference" in printed
    assert f"torch {torch.__version__.partition('+')[0]}" in printed
    assert len(printed.splitlines()) < 20


@pytest.mark.parametrize(
    ("found", "said"),
    [(None, "FAILED"), (replace(FOUND, difference=1e-9), "WRONG"), (replace(FOUND, difference=float("nan")), "WRONG")],
)
def test_what_ends_with_code_1(
    found: Found | None, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "run_trial", lambda limit: (found, "Error: no link\n"))
    with pytest.raises(SystemExit, match=r"^1$"):
        doctor.main([])
    printed = capsys.readouterr().out
    assert said in printed
    assert ("no link" in printed) == (found is None)


def test_on_gpus_rounding_is_allowed() -> None:
    assert replace(FOUND, difference=1e-5, backend="nccl").is_equal
    assert not replace(FOUND, difference=1e-2, backend="nccl").is_equal


def test_a_training_that_hangs_is_ended_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text("import time\ndef wait():\n    time.sleep(1000)\nwait()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_TRIAL", "hangs")
    found, log = doctor.run_trial(5)
    assert found is None
    assert "in wait" in log


def test_the_comparison_sees_a_delay_and_a_stage_without_one() -> None:
    rules = [StalenessRule(held=1), StalenessRule(held=0)]
    reference = expected(rules)
    assert largest_difference(reference, expected(rules)) == 0
    for others in ([StalenessRule(0), StalenessRule(0)], [StalenessRule(held=2), StalenessRule(held=0)]):
        assert largest_difference(expected(others), reference) > 1e-2
    broken = {name: value * float("nan") for name, value in reference.items()}
    assert largest_difference(broken, reference) == float("inf")
    assert largest_difference({}, reference) == float("inf")

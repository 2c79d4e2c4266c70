"""``asyncpp doctor`` reports on this machine, and exits with code 1 if its training fails or differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_asyncpp.core.schedule import StalenessRule
from lightning_asyncpp.tools import doctor
from lightning_asyncpp.tools.doctor import Found, expected, largest_difference

FOUND = Found("tensors travel over sockets", 3.0, 1e-9, "gloo")


@pytest.mark.slow
def test_two_stages_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main([])
    printed = capsys.readouterr().out
    assert "equal to the reference" in printed
    assert f"torch {torch.__version__.partition('+')[0]}" in printed


@pytest.mark.parametrize(("found", "told"), [(None, "no link"), (FOUND, "WRONG")], ids=["failed", "differs"])
def test_what_ends_with_code_1(
    found: Found | None, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "run_trial", lambda limit: (found, "Error: no link\n"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match=r"^1$"):
        doctor.main([])
    assert told in capsys.readouterr().out


def test_the_comparison_sees_a_delay_and_allows_rounding_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding errors pass on GPUs, also on one that two stages share over gloo; a delay or NaN never passes."""
    reference = expected([StalenessRule(num_stale=1), StalenessRule(num_stale=0)])
    assert largest_difference(expected([StalenessRule(0), StalenessRule(0)]), reference) > 1e-2
    assert largest_difference({name: value * float("nan") for name, value in reference.items()}, reference) == float(
        "inf"
    )
    for gpus in (0, 1, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert FOUND.is_equal == replace(FOUND, difference=1e-5).is_equal == (gpus > 0)
        assert not replace(FOUND, difference=0.1).is_equal

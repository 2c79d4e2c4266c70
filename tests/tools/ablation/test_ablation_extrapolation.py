"""Predictions from short trainings: they find the law that made the gaps, and their intervals hold what they say."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from lightning_asyncpp.tools.ablation.report.extrapolation import Gaps, main, predict
from tests.tools.ablation.examples import run, write_results

LENGTHS = (600, 1200, 2400)
BUDGET = Path(__file__).parents[3] / "docs" / "evidence" / "budget"


def drawn(a: float, b: float, error: float, seed: int, seeds: int = 3, lengths: tuple[int, ...] = LENGTHS) -> Gaps:
    source = random.Random(seed)
    return {t: [a * (t / 600) ** -b + source.gauss(0.0, error) for _ in range(seeds)] for t in lengths}


def test_a_gap_may_grow_if_it_is_allowed_to() -> None:
    known = drawn(0.1, -0.3, 1e-5, 1)
    assert predict(known, 9600, 3, slowest=-0.5).middle == pytest.approx(0.1 * 16**0.3, abs=1e-3)
    assert predict(known, 9600, 3).middle < 0.18


@pytest.mark.parametrize("b", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("a", [0.1, -0.1])
def test_a_law_is_found(a: float, b: float) -> None:
    said = predict(drawn(a, b, 1e-5, 1), 9600, 3)
    assert said.middle == pytest.approx(a * 16**-b, abs=2e-4)
    assert said.low < said.middle < said.high < said.low + 2e-3


@pytest.mark.parametrize("b", [pytest.param(0.3, marks=pytest.mark.slow), 1.0])
def test_intervals_hold_the_mean_of_new_trainings_nineteen_times_in_twenty(b: float) -> None:
    held = 0
    for k in range(100):
        said = predict(drawn(0.05, b, 0.02, k), 4800, 3)
        new = statistics.fmean(drawn(0.05, b, 0.02, 1000 + k, lengths=(4800,))[4800])
        held += said.low <= new <= said.high
    assert 88 <= held <= 100


def test_fewer_seeds_are_less_sure() -> None:
    known = drawn(0.05, 0.5, 0.02, 1)
    widths = [said.high - said.low for said in (predict(known, 4800, seeds) for seeds in (1, 3, 30))]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize(("gaps", "message"), [({600: [0.1, 0.2]}, "needs two"), ({1: [0.1], 2: [0.1]}, "no error")])
def test_what_cannot_be_predicted_from(gaps: Gaps, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(gaps, 9600, 3)


def test_the_command_predicts_every_delayed_row(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(BUDGET), "--until", "1200", "--at", "2400", "9600"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [
        "Muon, delay 1, EF, from 600, 1200 updates:",
        "Muon, delay least micro_batches=8, EF, from 600, 1200 updates:",
    ]
    assert [line.split(":")[0] for line in lines if line.startswith("  ")] == ["  2400", "  9600"] * 2


@pytest.mark.parametrize(("folder", "message"), [(BUDGET, "needs two"), (Path("nowhere"), "nowhere")])
def test_the_command_says_in_a_line_what_it_lacks(folder: Path, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main([str(folder), "--until", "600", "--at", "2400"])


def test_the_command_predicts_by_size(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runs = [run(1.0 + 0.01 * s, s, delay="0", variant=size) for size in ("0.14M", "0.25M", "1M") for s in (1, 2)]
    runs += [run(1.1 + 0.02 * s, s, variant=size) for size in ("0.14M", "0.25M", "1M") for s in (1, 2)]
    write_results(tmp_path, runs)
    main([str(tmp_path), "--until", "0.3", "--at", "0.5", "360"])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Muon, delay 1, none, from 0.14, 0.25 million parameters:"
    assert [line.split(":")[0] for line in said[1:]] == ["  0.5", "  360"]

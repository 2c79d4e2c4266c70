"""Grids plan the trainings that they need; tables and predictions are right for made-up losses and gaps."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from research.ablations.extrapolation import Gaps, predict
from research.ablations.law import BESIDES, fit, points_of, shares
from research.ablations.lengths import updates_over
from research.ablations.plots import gaps_by_update
from research.ablations.recipe import Recipe
from research.ablations.rows import Key, Row, Run
from research.ablations.search import best_lr, learning_rates, make_plan
from research.ablations.summary import Ablation
from research.ablations.tables import main_table, sides_table

NAN = math.nan


def run(loss: float, seed: int = 1, lr: float = 0.1, delay: str = "1", correction: str = "none", **row: Any) -> Run:
    names = {"optimizer": "Muon", "momentum": None, "variant": None, "stages": None} | row
    key = Key(Row(delay=delay, correction=correction, **names), lr, seed)
    return Run(key, loss, 600, 10.0, f"{key.row.name}{lr}{seed}")


def recipe(**keys: Any) -> Recipe:
    muon = {"class_path": "Muon", "init_args": {"betas": [0.9, 0.95]}, "lr": [0.1, 0.2]}
    return Recipe(**{"folder": Path(), "name": "mine", "recipe": "fit.yaml", "optimizers": {"Muon": muon}} | keys)


def test_a_wrapped_optimizer_is_built_with_its_learning_rate_and_momentum() -> None:
    muon = {"class_path": "Muon", "init_args": {"betas": [0.9, 0.95]}, "lr": [0.1], "lr_argument": ["lr", "lr_1d"]}
    muon["momentum"] = {"argument": "betas.0", "values": [0.5]}
    ef = {"class_path": "EF", "init_args": {"strength": 2}}
    grid = recipe(optimizers={"Muon": muon}, corrections={"EF": ef}, delays=[0, 1], variants={"a": {}, "b": {}})
    fresh, delayed = list(grid.arms())[:2]
    base = {"class_path": "Muon", "init_args": {"betas": [0.5, 0.95], "lr": 0.1, "lr_1d": 0.1}}
    assert fresh.optimizer_config(0.1) == base
    assert delayed.optimizer_config(0.1) == {"class_path": "EF", "init_args": {"strength": 2, "base": base}}
    assert delayed.row.name == "Muon_momentum0.5_a_delay1_EF"
    assert muon["init_args"] == {"betas": [0.9, 0.95]}


@pytest.mark.parametrize(
    ("known", "tried"),
    [
        ({0.1: 2.0, 0.2: 1.0}, [0.1, 0.2, 0.4]),
        ({0.1: 1.0, 0.2: 2.0}, [0.05, 0.1, 0.2]),
        ({0.1: NAN, 0.2: NAN}, [0.05, 0.1, 0.2]),
        ({0.1: 4.0, 0.2: 3.0, 0.4: 2.0, 0.8: 1.0}, [0.1, 0.2, 0.4, 0.8]),
    ],
)
def test_the_search_goes_beyond_an_edge_while_the_best_is_there(known: dict[float, float], tried: list[float]) -> None:
    assert learning_rates([0.2, 0.1], 2, known) == tried


def test_further_seeds_and_rows_of_the_same_learning_rate_wait_for_the_search() -> None:
    grid = recipe(delays=[1], corrections={"EF": {"class_path": "EF", "lr": "same"}, "none": None})
    arms, seeds = list(grid.arms()), [1, 2]
    bare, ef = Row("Muon", None, None, "1", None, "none"), Row("Muon", None, None, "1", None, "EF")
    plan = make_plan(arms, seeds, 0, {Key(bare, 0.1, 1): 1.0})
    assert (plan.needed, plan.waiting) == ([Key(bare, 0.1, 1), Key(bare, 0.2, 1)], 3)
    plan = make_plan(arms, seeds, 0, {Key(bare, 0.1, 1): 1.0, Key(bare, 0.2, 1): 2.0})
    assert plan.needed[2:] == [Key(ef, 0.1, 1), Key(bare, 0.1, 2), Key(ef, 0.1, 2)]
    plan = make_plan(arms, seeds, 0, {Key(bare, 0.1, 1): NAN, Key(bare, 0.2, 1): NAN})
    assert (plan.chosen, plan.waiting) == ({bare: None, ef: None}, 0)
    assert best_lr({0.2: 1.0, 0.1: 1.0, 0.05: NAN}) == 0.1


def test_gaps_and_shares_are_paired_by_seed() -> None:
    losses = {"0": (1.0, 1.1), "1": (1.2, 1.3)}
    runs = [run(loss, seed, delay=delay) for delay, ones in losses.items() for seed, loss in enumerate(ones, start=1)]
    runs += [run(1.05, 1, correction="EF"), run(NAN, 2, correction="EF"), run(1.3, 1, lr=0.2, delay="0")]
    ablation = Ablation.of("mine", runs)
    (line,) = [line for line in main_table(ablation).splitlines() if line.startswith("| Muon")]
    assert line == (
        "| Muon | 1.050 ± 0.635 (0.1 †) | 1.250 ± 0.635 (0.1 ‡) | +0.200 ± 0.000"
        " | 1 of 2 diverged, else 1.050 (0.1 ‡) | 75 %, 1 of 2 diverged |"
    )


def drawn(seed: int, *lengths: int) -> Gaps:
    """Return gaps that fall with the length, with noise."""
    source = random.Random(seed)
    return {t: [0.05 * 600 / t + source.gauss(0.0, 0.02) for _ in range(3)] for t in lengths}


def test_intervals_hold_the_mean_of_new_trainings_nineteen_times_in_twenty() -> None:
    held = 0
    for k in range(100):
        found = predict(drawn(k, 600, 1200, 2400), 4800, 3)
        held += found.low <= statistics.fmean(drawn(1000 + k, 4800)[4800]) <= found.high
    assert 88 <= held <= 100


def test_the_law_of_staleness_is_found_whatever_the_stages() -> None:
    settings = [("0", None), ("1", None), *((f"least microbatches={m * p}", p) for p in (2, 4, 8) for m in (1, 2, 4))]
    settings += [("least microbatches=8 slack=exact", 4), ("least lookahead=1 microbatches=8", 8)]
    runs = []
    for delay, stages in settings:
        phi = statistics.fmean(age**2 for age in shares(run(0.0, delay=delay, stages=stages).key.row)) ** 0.5
        more = 0.01 * ("lookahead" in delay)
        runs += [
            run(seed + 0.2 * phi**1.5 + more, seed, delay=delay, stages=stages, correction="EF" if phi else "none")
            for seed in (1, 2)
        ]
    (data,) = points_of(Ablation.of("mine", runs)).values()
    found = fit(data, BESIDES)
    assert found[["a", "b", 1, 2, "lookahead"]].tolist() == pytest.approx([0.2, 1.5, 1.0, 2.0, 0.01])
    assert found[[name for name in BESIDES if name != "lookahead"]].abs().max() < 1e-9
    assert shares(run(0.0, delay="least microbatches=8", stages=4).key.row) == [0.375, 0.25, 0.125, 0]
    four, eight = ("least microbatches=4", "least lookahead=3 microbatches=8")
    assert shares(run(0.0, delay=four, stages=4).key.row) == shares(run(0.0, delay=eight, stages=4).key.row)


def test_distances_are_to_the_best_of_a_family_with_one_interval() -> None:
    losses = {("Muon", "0"): (1.1, 1.3), ("Muon-ahead", "0"): (1.0, 1.2), ("Muon-ahead", "least"): (1.2, 1.3)}
    runs = [run(loss, i, optimizer=o, delay=d) for (o, d), ones in losses.items() for i, loss in enumerate(ones)]
    lines = sides_table(Ablation.of("mine", [*runs, run(5.0, optimizer="SOAP", delay="0")])).splitlines()
    width = 4.303 * math.sqrt(0.1**2 / 6)  # of residuals -1/60, -1/60 and 1/30, with the other sign on the other seed
    assert lines[2:5] == [
        f"| Muon | alone | +0.100 |  | ± {width:.3f} |",
        f"| Muon | looking ahead | 1.100 | +0.150 | ± {width:.3f} |",
        "| SOAP | alone | 5.000 |  |  |",
    ]


def test_updates_to_a_loss_are_read_from_the_curve_without_delay() -> None:
    syncs = [run(1.0, seed, delay="0") for seed in (1, 2)]
    late = [run(1.5, 1), run(0.9, 2)]  # equal at 450, halfway from 300 to 600, and at 630, a tenth of that beyond 600
    values = [(sync.cell, step, value) for sync in syncs for step, value in ((200, 3.0), (300, 2.0), (600, 1.0))]
    values += [(one.cell, 600, one.loss) for one in late]
    curves = pd.DataFrame([(cell, step, "val_loss", value) for cell, step, value in values],
                          columns=["cell", "step", "metric", "value"])  # fmt: skip
    fresh, old = Ablation.of("", [*syncs, *late]).results.values()
    ratios = updates_over(fresh, old, curves)
    assert ratios.to_dict() == {1: pytest.approx(600 / 450), 2: pytest.approx(600 / 630)}


def test_gaps_by_update_are_paired_by_seed() -> None:
    losses = {"0": [(2.0, 1.0), (2.5, 1.5)], "least": [(2.2, 1.1), (2.5, 1.5)]}
    losses["least synchronous_start=2"] = losses["0"]
    runs = [run(1.0, seed, delay=delay) for delay in losses for seed in (1, 2)]
    rows = [(r.cell, step, "val_loss", value) for r in runs
            for step, value in zip((5, 10), losses[r.key.row.delay][r.key.seed - 1])]  # fmt: skip
    curves = pd.DataFrame(rows, columns=["cell", "step", "metric", "value"])
    lines = gaps_by_update(Ablation.of("", runs), curves)["Muon"]
    gaps = [(step, gap.round(9).to_dict()) for step, gap in lines["throughout"]]
    assert gaps == [(5, {1: 0.2, 2: 0.0}), (10, {1: 0.1, 2: 0.0})]

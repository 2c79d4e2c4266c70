"""Tiny runs of every benchmark give plausible figures; speed is not tested."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.simulation import pace_of
from lightning_asyncpp.core.trace import Span
from research.benchmarks import link, optimizer
from research.benchmarks.ideal import make_schedules
from research.benchmarks.report import Figures, Spread
from research.benchmarks.run import Clock, RankRun, Run
from research.benchmarks.stages import jitter_factor
from tests.helpers import programs as forked

ROOT = Path(__file__).parents[3]
TINY = ["--stages", "2", "--mini-batches", "2", "--warm-up", "2", "--repeats", "1"]


def run_command(arguments: list[str], folder: Path) -> str:
    """Run ``python -m research.benchmarks ...`` in a process of the fork server, and return its output."""
    command = ["-m", "research.benchmarks", *arguments]
    done = forked.run(command, folder, 200, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def read_losses(path: Path) -> dict[str, float]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert float(row["milliseconds"]) > 0
        assert not row["utilisation"] or 0 < float(row["utilisation"]) <= 1
    return {row["system"]: float(row["loss"] or "nan") for row in rows}


@pytest.mark.parametrize(
    "more", [[], pytest.param(["gpipe", "async+2bw", "interleaved-zb", "floor"], marks=pytest.mark.slow)]
)
def test_schedule_compares_systems_that_train_the_same(more: list[str], tmp_path: Path) -> None:
    systems = ["async", "async+fabric", "sync", "1f1b", *more]
    sleeps = ["--microbatches", "4", "--forward-ms", "2", "--backward-ms", "4", "--csv", "x.csv", "--svg", "x.svg"]
    printed = run_command(["schedule", *TINY, *sleeps, "--systems", *systems], tmp_path)
    assert "ideal without a flush, no messages, no jitter: 24.0 ms" in printed
    assert "ideal with a flush, no messages, no jitter: 30.0 ms" in printed
    losses = read_losses(tmp_path / "x.csv")
    assert list(losses) == systems
    assert losses["sync"] == pytest.approx(losses["1f1b"], rel=1e-6)
    assert losses.get("gpipe", losses["1f1b"]) == pytest.approx(losses["1f1b"], rel=1e-6)
    assert losses["async"] == pytest.approx(losses["async+fabric"], rel=1e-6)
    assert losses["async"] != pytest.approx(losses["sync"], rel=1e-6)
    text = (tmp_path / "x.svg").read_text()
    assert all(word in text for word in ("sync_pipeline", "async_pipeline", "stage 1"))


COMPARED = {
    "compute": ["--microbatches", "2", "--rows", "4", "--width", "8", "--target-ms", "0.5"],
    "network": ["--layers", "2", "--dim", "64", "--context", "8", "--rows", "1", "--replicas", "2", "--hosts", "1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARED)
def test_others_train_the_same_with_and_without_torchs_schedule(name: str, tmp_path: Path) -> None:
    run_command([name, *TINY, *COMPARED[name], "--csv", "x.csv", "--systems", "sync", "1f1b"], tmp_path)
    losses = read_losses(tmp_path / "x.csv")
    assert losses["sync"] == pytest.approx(losses["1f1b"], rel=1e-4)


def test_our_strategies_clip_if_they_are_told_to(tmp_path: Path) -> None:
    sleeps = ["--microbatches", "2", "--forward-ms", "1", "--backward-ms", "2", "--csv", "x.csv"]
    run_command(["schedule", *TINY, *sleeps, "--max-norm", "0.001", "--systems", "sync", "1f1b"], tmp_path)
    losses = read_losses(tmp_path / "x.csv")
    assert losses["sync"] > 1.001 * losses["1f1b"]


@pytest.mark.slow
def test_time_to_loss_trains_a_recipe(tmp_path: Path) -> None:
    short = ["--steps", "4", "--validate-every", "2", "--val-batches", "1", "--seeds", "0", "--json", "x.json"]
    printed = run_command(["time-to-loss", *short, "--ahead", "1"], tmp_path)
    assert "sync: " in printed
    assert "async: " in printed


@pytest.mark.slow
@pytest.mark.skipif(bool(link.missing()), reason=f"two hosts need {link.missing()}")
def test_a_link_between_two_hosts_has_its_latency(tmp_path: Path) -> None:
    printed = run_command(
        ["schedule", *TINY, "--hosts", "2", "--link-latency-ms", "20", "--forward-ms", "1", "--backward-ms", "1",
         "--microbatches", "2", "--systems", "1f1b"], tmp_path,
    )  # fmt: skip
    milliseconds = float(printed.split("| 1f1b | ")[1].split()[0])
    assert milliseconds > 40  # the latency counts in both directions


def test_optimizer_compares_steps(tmp_path: Path) -> None:
    sizes = ["--layers", "1", "--width", "32", "--heads", "4", "--kv-heads", "2", "--mlp", "96"]
    systems = ["--systems", "ours", "torch-fused", "--repeats", "2", "--threads", "1", "--vocab", "20"]
    printed = run_command(["optimizer", *sizes, *systems], tmp_path)
    rows = {row.split(" | ")[0].strip("| "): row for row in printed.splitlines() if row.startswith("|")}
    assert float(rows["ours"].split("|")[4]) < 0.02  # rounding errors of bfloat16 sums in another order
    assert "Error Feedback adds" in printed


def test_error_feedback_is_timed_at_work() -> None:
    layer = nn.Linear(3, 2, bias=False)
    step = optimizer.feedback_alone(layer)
    step()
    moved = layer.weight.detach().add_(1.0).clone()  # as the corrected optimizer would
    step()
    torch.testing.assert_close(layer.weight.detach(), moved + 1.0)


KNOWN = {  # stages, microbatches, lookahead, delay: utilisation with messages of 0, 1.2 and 10 ms, and with jitter
    (2, 2, 1, 1): (1.000, 1.000, 1.000, 1.000),
    (4, 4, 1, 1): (1.000, 0.988, 0.815, 0.91),
    (8, 8, 0, 1): (1.000, 0.965, 0.772, 0.86),
    (8, 8, 0, 0): (0.533, 0.514, 0.413, 0.51),
    (8, 16, 7, 1): (1.000, 1.000, 1.000, 0.98),
}


@pytest.mark.parametrize("shape", KNOWN, ids=str)
def test_what_the_schedules_are_worth_where_nothing_is_measured(shape: tuple[int, int, int, int]) -> None:
    stages, microbatches, lookahead, delay = shape
    schedules = make_schedules(stages, delay, lookahead, "uniform")
    for (hop, sigma), known in zip(((0.0, 0.0), (1.2, 0.0), (10.0, 0.0), (0.0, 0.2)), KNOWN[shape], strict=True):

        def lasting(milliseconds: float, kind: Kind, sigma: float = sigma) -> Any:
            return lambda stage, k: milliseconds * jitter_factor(sigma, 0, stage, k, kind)

        times = lasting(20.0, Kind.FORWARD), lasting(40.0, Kind.BACKWARD)
        assert max(pace_of(schedules, microbatches, *times, hop).work) > 0.98 * known, (hop, sigma)


def test_figures_leave_out_the_warm_up_and_the_last_mini_batch() -> None:
    run = Run(stages=1, warm_up=1, mini_batches=2, repeats=1)
    spans = [Span(Kind.FORWARD, 0, 0.0, 1.5), Span(Kind.BACKWARD, 0, 2.0, 2.5)]
    clock = Clock([1.0, 2.0, 3.0, 9.0], [0.0, 0.5, 1.0, 5.0])
    ranks = [RankRun("x", 0, spans, clock, 0.5), RankRun("x", 0, spans, clock, 1.5)]
    assert Figures.of(run, [ranks]) == Figures([1000.0], [500.0 / run.microbatches], [0.5], [1.0])
    assert Spread.of([3.0, 1.0, 2.0]).text(1) == "2.0 [1.0-3.0]"

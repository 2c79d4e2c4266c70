"""A long training of a tiny model, watched: ``python -m tests.load --steps 10000 --out runs/load``."""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import torch

from tests.load.judge import Verdict, judge
from tests.load.probe import Sample
from tests.load.runs import Load, fabric_under_load, trainer_under_load
from tests.load.turns import Turns
from tests.trainer.pool import Pools, Scenario

LAPS = 20
WARM_UP = 300
Ranks = list[list[Sample]]


def main() -> int:
    """Train, write what was seen of each rank, and say what is not steady."""
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--fabric", action="store_true", help="a loop over Fabric instead of the Trainer")
    parser.add_argument("--out", type=Path, default=Path("runs/load"), help="folder for samples.csv and summary.txt")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds")
    given = parser.parse_args()
    # torch keeps what it knows of the last 2,000 collectives, a KiB each, and gives it out and takes it back with every
    # further one: memory grows by that alone. Set before the first process starts.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    torch.set_num_threads(1)
    options = {"micro_batches": given.stages, "data_parallel_size": given.replicas}
    load = Load(given.steps, options=options)
    world = given.stages * given.replicas
    if given.fabric:
        ranks = run_alone(fabric_under_load, load, world, given.timeout)
        verdict = judge(ranks)
    else:
        ranks, new = run_in_turns(load, world, given.timeout)
        verdict = judge(ranks, new, given.steps)
    given.out.mkdir(parents=True, exist_ok=True)
    write_samples(ranks, given.out / "samples.csv")
    text = summary(ranks, verdict)
    (given.out / "summary.txt").write_text(text)
    print(text)
    return 1 if verdict.problems() else 0


def run_alone(scenario: Scenario, load: Load, world: int, timeout: float) -> Ranks:
    """The samples of each rank of a training in processes of its own."""
    pools = Pools()
    try:
        return pools.run(world, scenario, load, timeout=timeout)
    finally:
        pools.close()


def run_in_turns(load: Load, world: int, timeout: float) -> tuple[Ranks, Ranks]:
    """A long training, and then laps of it in turns with those of one that has just begun."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as threads:
        old, new = Turns(folder, "old", "new", load.steps), Turns(folder, "new", "old", WARM_UP)
        old.begin()
        runs = [
            threads.submit(run_alone, trainer_under_load, loaded, world, timeout)
            for turns in (old, new)
            for loaded in (replace(load, turns=turns, steps=turns.before + LAPS * load.every),)
        ]
        return runs[0].result(), runs[1].result()


def write_samples(ranks: Sequence[Sequence[Sample]], path: Path) -> None:
    """One row per rank and look."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["rank", *asdict(ranks[0][0])])
        writer.writeheader()
        writer.writerows({"rank": rank, **asdict(sample)} for rank, samples in enumerate(ranks) for sample in samples)


def summary(ranks: Sequence[Sequence[Sample]], verdict: Verdict) -> str:
    """A table of ten moments of each rank, and the verdict."""
    columns = ("threads", "files", "objects", "works")
    titles = " ".join(f"{column:>8}" for column in columns)
    lines = [f"{'rank':>4} {'step':>6} {'RSS MiB':>8} {'step ms':>8} {'CPU ms':>7} {titles}"]
    for rank, samples in enumerate(ranks):
        for sample in samples[len(samples) // 10 - 1 :: max(1, len(samples) // 10)]:
            figures = f"{sample.resident / 2**20:8.1f} {sample.wall * 1e3:8.2f} {sample.cpu * 1e3:7.2f}"
            numbers = " ".join(f"{getattr(sample, column):8}" for column in columns)
            lines.append(f"{rank:4} {sample.step:6} {figures} {numbers}")
    growth = ", ".join(f"{value:.2f}" for value in verdict.growth)
    lines.append(f"memory: {growth} MiB per 10,000 steps (ranks in order)")
    lines += [
        f"{name} per step, old training / new one: {r.median:.3f} (95 % interval {r.low:.3f} to {r.high:.3f})"
        for name, r in verdict.slower.items()
    ]
    return "\n".join([*lines, *(verdict.problems() or ["steady"])]) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())

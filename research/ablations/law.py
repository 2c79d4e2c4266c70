"""The law of staleness: what it costs that a share phi of each gradient is one update old.

``python -m research.ablations.law docs/evidence/law``

For each optimizer and correction the losses of all rows, without a delay or with one, are taken to be ``L + a phi^b +
c`` with errors of equal size; every seed has an L of its own. phi is the root of the mean square, over the stages, of
the shares that the schedule says; c, the cost of clipping before the whole norm is known, counts only for rows that
do. Intervals are those of a bootstrap that draws both seeds and rows with replacement, since of either there are
few. With one seed they leave out the error of its run without a delay.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import yaml  # type: ignore[import-untyped, unused-ignore]

from lightning_asyncpp.core.settings import PipelineSettings
from research.ablations.results import read_runs
from research.ablations.rows import UNCORRECTED, Row
from research.ablations.summary import NO_DELAY, Ablation

POWERS = np.arange(0.5, 4.01, 0.05)
"""Values of b that are tried."""
AT = (0.1169, 0.2338, 0.4677, 1.0)
"""Shares whose cost is printed: four stages with 16, 8 and 4 microbatches, and PipeDream-2BW."""
CLIPPING = "clips_ahead"
"""Column of c in the data."""
BESIDES = ("log2_stages", "lookahead")
"""What else might cost something at the same phi."""
_DRAWS = 500


def shares(row: Row) -> list[float]:
    """Return the age of each stage's gradient, in updates, as a mean over its microbatches."""
    settings = {k: yaml.safe_load(v) for k, v in (part.split("=") for part in row.delay.split(" ")[1:])}
    if row.kind != "least":
        settings |= {"delay": int(row.kind), "staleness": "uniform"}
    resolved = PipelineSettings.chosen(**{"delay": 1} | settings).resolved(row.stages or 1)
    stages = [resolved.schedule(stage) for stage in range(resolved.num_stages)]
    return [stage.stage_rule.staleness(resolved.microbatches) for stage in stages]


def points_of(ablation: Ablation) -> dict[str, pd.DataFrame]:
    """Return the losses of each optimizer and correction; those without a delay count for all its corrections."""
    lines: dict[str, list[dict]] = {}
    pairs = [(a, b.correction) for a, b in product(ablation.results, repeat=2) if a.group == b.group]
    for row, correction in dict.fromkeys(pairs):
        if row.setting != NO_DELAY and row.correction != correction:
            continue
        ages = np.array(shares(row))
        line = {
            "row": row, "phi": (ages**2).mean() ** 0.5, "mean": ages.mean(), "delayed": float(ages.any()),
            "stages": row.stages or 1, "log2_stages": np.log2((row.stages or 4) / 4),
            "lookahead": float("lookahead" in row.delay),
            CLIPPING: float(row.kind == "least" and "slack=exact" not in row.delay),
        }  # fmt: skip
        losses = ablation.results[row].losses.dropna()
        name = row.group.label + ("" if correction == UNCORRECTED else f" + {correction}")
        lines.setdefault(name, []).extend(line | {"seed": seed, "loss": loss} for seed, loss in losses.items())
    return {name: pd.DataFrame(ones) for name, ones in lines.items() if any(one["phi"] for one in ones)}


def fit(data: pd.DataFrame, besides: Sequence[str] = (), phi: str = "phi") -> pd.Series:
    """Fit by least squares: a, b, c, coefficients of further columns, L by seed, and ``error``, that of one loss."""
    besides = [CLIPPING, *besides]
    seeds = pd.get_dummies(data.seed, dtype=float)
    others, loss = np.column_stack([data[besides], seeds]), data.loss.to_numpy()
    within = np.eye(len(data)) - others @ np.linalg.pinv(others)  # takes away what the other columns explain
    tried = within @ data[phi].to_numpy()[:, None] ** POWERS  # (n, b)
    explained = (tried * loss[:, None]).sum(0) ** 2 / (tried**2).sum(0)
    b = POWERS[int(explained.argmax())]
    columns = np.column_stack([data[phi] ** b, others])
    solution = np.linalg.lstsq(columns, loss, rcond=None)[0]
    freedom = max(1, len(data) - len(solution) - 1)
    error = (((loss - columns @ solution) ** 2).sum() / freedom) ** 0.5
    return pd.Series({**dict(zip(["a", *besides, *seeds.columns], solution)), "b": b, "error": error})


def bootstrap(data: pd.DataFrame, besides: Sequence[str] = ()) -> pd.DataFrame:
    """Fit to seeds and rows drawn with replacement, a line each; rows without a delay are always among them."""
    generator = np.random.default_rng(0)
    fits: list[pd.Series] = []
    while len(fits) < _DRAWS:
        rows = np.where(data.delayed > 0, _drawn(data.row.where(data.delayed > 0), generator), 1)
        drawn = data.iloc[np.repeat(np.arange(len(data)), rows * _drawn(data.seed, generator))]
        if drawn.phi.nunique() > 3:
            fits.append(fit(drawn, besides))
    return pd.DataFrame(fits)


def _drawn(values: pd.Series, generator: np.random.Generator) -> np.ndarray:
    """Return how often each value is drawn, in as many draws as there are different values."""
    codes, names = pd.factorize(values)
    counts = np.bincount(generator.integers(len(names), size=len(names)), minlength=len(names))
    return np.asarray(counts[codes])


def costs(fits: pd.DataFrame, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 2.5 and 97.5 % quantiles of ``a phi^b`` at each share."""
    curves = fits.a.to_numpy()[:, None] * at ** fits.b.to_numpy()[:, None]
    low, high = np.quantile(curves, [0.025, 0.975], axis=0)
    return low, high


def describe(data: pd.DataFrame, at: Sequence[float] = AT) -> list[str]:
    """Describe the law of an optimizer, its cost at some shares, and what else matters."""
    besides = [name for name in BESIDES if data[name].nunique() > 1]
    law, fits, wide, more = fit(data), bootstrap(data), bootstrap(data, besides), fit(data, besides)
    lines = [f"{data.row.nunique()} rows, {len(data)} losses, error {law.error:.4f}"]
    lines.append(f"error with the mean over the stages: {fit(data, phi='mean').error:.4f}")
    lines += [f"{name} {law[name]:.3f}{_interval(fits[name])}" for name in ("a", "b", CLIPPING)]
    for phi in at:
        cost, drawn = law.a * phi**law.b, fits.a * phi**fits.b
        lines.append(f"phi {phi:g}: {cost:+.4f}{_interval(drawn)}")
        lines.append(f"... with clipping: {cost + law[CLIPPING]:+.4f}{_interval(drawn + fits[CLIPPING])}")
    return lines + [f"at the same phi, per {name}: {more[name]:+.4f}{_interval(wide[name])}" for name in besides]


def _interval(values: pd.Series) -> str:
    low, high = values.quantile([0.025, 0.975])
    return f", 95 % {low:+.4f} to {high:+.4f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the laws of a folder's table."""
    parser = argparse.ArgumentParser(prog="python -m research.ablations.law", description=__doc__)
    parser.add_argument("folder", type=Path, help="such as docs/evidence/law")
    parser.add_argument("--at", type=float, nargs="+", default=AT, help="shares phi whose cost is printed")
    options = parser.parse_args(argv)
    for name, data in points_of(Ablation.of(*read_runs(options.folder))).items():
        print(f"{name}:", *describe(data, options.at), sep="\n  ")


if __name__ == "__main__":
    main()

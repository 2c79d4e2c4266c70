"""Idioms of Lightning's documentation equal one process bit for bit if they work, and are refused if they cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_asyncpp import ConfigurationError
from tests.helpers.oracle import assert_equal_weights
from tests.helpers.pool import Pools, impatient
from tests.helpers.trainer import fit, staged, train
from tests.trainer.idioms import Idiom, data, optimization, steps

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "idioms.md"
IDIOMS = [*steps.IDIOMS, *optimization.IDIOMS, *data.IDIOMS]
WORKING = [idiom for idiom in IDIOMS if not idiom.says]
THREE = {"microbatches": 3, "partition": "uniform"}


def assert_equal(idiom: Idiom, weights: dict[str, np.ndarray], found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_equal_weights(weights, expected["weights"])
    assert found["global_step"] == expected["global_step"]
    if idiom.metrics:
        assert found["callback_metrics"] == pytest.approx(expected["callback_metrics"], rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("idiom", WORKING, ids=lambda idiom: idiom.rows)
def test_three_stages_train_as_one(idiom: Idiom) -> None:
    one, three = (train(staged(idiom.run(options={"microbatches": 3}), stages)) for stages in (1, 3))
    assert_equal(idiom, three["weights"], three, one)


@pytest.mark.parametrize("idiom", [i for i in WORKING if i.processes], ids=lambda idiom: idiom.rows)
def test_ranks_train_as_one_process(pools: Pools, idiom: Idiom) -> None:
    """With the default strategy, ranks train as one process, and all ranks have the same metrics."""
    run = idiom.run(strategy="default", options=THREE)
    results = pools.run(3, fit, run)
    weights, expected = results[0]["full_at_end"], train(staged(run))
    trained = {name: weights[name] for name in expected["weights"]}
    for result in results:
        assert_equal(idiom, trained, result, expected)
    assert len({str(sorted(result["callback_metrics"].items())) for result in results}) == 1


@pytest.mark.parametrize("idiom", [i for i in IDIOMS if i.says and not i.processes], ids=lambda i: i.rows)
def test_refused(idiom: Idiom) -> None:
    with pytest.raises((ConfigurationError, RuntimeError, TypeError)) as refused:
        train(staged(idiom.run()))
    assert idiom.says in str(refused.value)


@pytest.mark.parametrize("idiom", [i for i in IDIOMS if i.says and i.processes], ids=lambda i: i.rows)
def test_refused_where_a_rank_lacks_something(pools: Pools, idiom: Idiom) -> None:
    outcomes = pools.outcomes(3, impatient, fit, idiom.run(options=THREE))
    assert all(outcome.error for outcome in outcomes)
    assert any(idiom.says in outcome.message for outcome in outcomes), outcomes[0].message


def test_every_row_of_the_page_is_tested() -> None:
    """Every row and list item of the page is tested, and refused exactly if its verdict is "refused"."""
    text = PAGE.read_text()
    cells = [line.removeprefix("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    verdicts = {row[0]: row[1] for row in cells if row[1] in ("refused", "works, with a note")}
    verdicts |= {line.removeprefix("* "): "works" for line in text.splitlines() if line.startswith("* ")}
    for idiom in IDIOMS:
        for part in idiom.rows.split(" | "):
            (row,) = (row for row in verdicts if part in row)
            assert bool(idiom.says) == (verdicts.pop(row) == "refused")
    assert not verdicts

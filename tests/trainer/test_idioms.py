"""Idioms of Lightning's documentation: what works equals one process bit by bit, what cannot work is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.pool import Pools, impatient
from tests.helpers.trainer import delayed, fit
from tests.trainer.idioms.entry import NO, REFUSED, Idiom
from tests.trainer.idioms.page import PAGE, TABLE, page

STAGES = [3, pytest.param(2, marks=pytest.mark.slow)]
# What another row, or another test, has the same paths through the pipeline for.
ALIKE = (
    *("ReturnsMore", "Distils", "Contrasts", "TrainsInEvaluationMode", "LogsAll", "LogsOnRankZero", "Measures"),
    *("SavesMore", "Curriculum", "NothingToCollate", "Streams", "Combines", "TransfersItself"),
    *("limit_train_batches", "overfit_batches", "num_sanity_val_steps", "check_val_every_n_epoch", "max_steps"),
    *("min_epochs-max_time", "detect_anomaly", "deterministic", "profiler", "enable_model_summary", "inference_mode"),
    *("OneCycle", "WarmUp", "LogsTheRate", "DecaysMatricesOnly", "LogsGradientNorm", "ClipsLater", "gradient_clip_val"),
    *("accumulate_grad_batches", "precision"),
)
WORKING = [idiom for idiom in TABLE if idiom.verdict not in (REFUSED, NO)]
REFUSED_ONES = [idiom for idiom in TABLE if idiom.verdict == REFUSED]


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(
    "idiom",
    [pytest.param(i, id=i.name, marks=[pytest.mark.slow] if i.name in ALIKE else []) for i in WORKING],
)
def test_works(pools: Pools, idiom: Idiom, stages: int) -> None:
    """Weights equal to the last bit those of one process, and so does what is logged."""
    options = {"microbatches": 3, "partition": "uniform", **idiom.options}
    run = replace(idiom.run(), strategy="default", options=options)
    results = pools.run(stages, fit, run)
    (expected,) = pools.run(1, fit, delayed(run, stages=stages, **options))
    trained = results[0]["full_at_end"]
    apart = [name for name, array in expected["weights"].items() if not np.array_equal(array, trained[name])]
    assert not apart
    assert {result["global_step"] for result in results} == {expected["global_step"]}
    assert len({str(sorted(result["callback_metrics"].items())) for result in results}) == 1
    if idiom.metrics:
        assert results[0]["callback_metrics"] == pytest.approx(expected["callback_metrics"], rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("idiom", REFUSED_ONES, ids=lambda idiom: idiom.name)
def test_refused(pools: Pools, idiom: Idiom, stages: int) -> None:
    """Every rank says why."""
    outcomes = pools.outcomes(stages, impatient, fit, replace(idiom.run(), options={"microbatches": 3}))
    assert all(outcome.error for outcome in outcomes)
    assert any(idiom.says in outcome.message for outcome in outcomes), outcomes[0].message


def test_names_are_distinct() -> None:
    assert len({idiom.name for idiom in TABLE}) == len(TABLE)
    assert set(ALIKE) < {idiom.name for idiom in WORKING}


def test_page() -> None:
    """``python -m tests.trainer.idioms`` writes it."""
    assert PAGE.read_text() == page()

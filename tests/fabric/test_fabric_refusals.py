"""Calls that would go wrong are refused, on every rank where ranks could otherwise diverge; no rank is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_asyncpp.errors import ConfigurationError, NonFiniteGradientError
from tests.helpers.cases import Case, make_model
from tests.helpers.engine import assert_same_weights, run_oracle
from tests.helpers.fabric import Run
from tests.helpers.pool import Pools

CASE = Case(4)


REFUSED: dict[str, tuple[Callable[[Run], object], str]] = {
    "a-second-model": (lambda run: run.fabric.setup_module(make_model()), "a second model"),
    "a-second-optimizer": (lambda run: run.fabric.setup_optimizers(run.optimizer.optimizer), "parameter groups"),
    "both-clippings": (
        lambda run: [
            run.fabric.clip_gradients(run.model, run.optimizer, **limit) for limit in ({"clip_val": 1}, {"max_norm": 1})
        ],
        "use only one of them",
    ),
    "a-step-without-the-model": (
        lambda run: run.strategy.training_step(lambda batch: batch["x"].sum(), CASE.batch(0)),
        "without calling model",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    run, (attempt, message) = Run(CASE, stages=2), REFUSED[name]
    run.strategy.training_step(CASE.step(run.model), CASE.batch(0))
    with pytest.raises(ConfigurationError, match=message):
        attempt(run)


def during_an_update(case: Case, path: Path) -> tuple[dict[str, Any], set[str]]:
    """Train, try to save, load, drain, gather and evaluate in each optimizer step; return the result and the errors."""
    run, told = Run(case), set()
    tries = (
        lambda: run.fabric.save(path, run.state), lambda: run.fabric.load(path, run.state),
        run.strategy.drain, run.strategy.full_state_dict, run.evaluate,
    )  # fmt: skip

    def meet(*_: Any) -> None:
        for attempt in tries:
            with pytest.raises(RuntimeError) as error:
                attempt()
            told.add(str(error.value))
        run.model.train()

    run.optimizer.optimizer.register_step_pre_hook(meet)
    run.optimizer.optimizer.register_step_post_hook(meet)
    run.train()
    return run.result(), told


def test_what_drains_is_refused_while_an_update_is_applied(pools: Pools, tmp_path: Path) -> None:
    results = pools.run(2, during_an_update, CASE, tmp_path / "saved")
    assert_same_weights([result for result, _ in results], run_oracle(CASE)[0])
    assert all("while an update is applied" in text for _, told in results for text in told)
    assert not (tmp_path / "saved").exists()


def collective_after_failure() -> None:
    run = Run(CASE)
    with torch.no_grad():
        next(iter(run.strategy.session.stage.parameters.values())).fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(NonFiniteGradientError):
        run.train()
    run.fabric.barrier()


def test_after_a_failure_collectives_raise(pools: Pools) -> None:
    for outcome in pools.outcomes(2, collective_after_failure):
        assert outcome.error == "RuntimeError", outcome
        assert "the pipeline has failed" in outcome.message

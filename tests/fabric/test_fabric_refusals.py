"""What cannot be run right is refused on every rank, with the mend; nobody waits for anybody."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp.core.schedule import Staleness
from tests.fabric import refused
from tests.helpers.cases import Case
from tests.helpers.fabric import train
from tests.helpers.oracle import assert_equal_weights
from tests.helpers.pool import Outcome, Pools

CONFIGURATION = [
    (refused.optimizer_before_module, "one model, which is set up first, and one optimizer"),
    (refused.two_optimizers, "one optimizer. Call .*parameter groups"),
    (refused.two_models, r"a second model \(Sequential\)"),
    (refused.fp16, "precision='16-true' is not supported: .*bf16-mixed"),
    (refused.wrong_reduction, "loss_reduction='max' must be"),
    (refused.uncuttable_model, r"Bilinear, which the pipeline cannot cut.*pipeline_layers\(\)"),
    (refused.no_initialiser_on_the_last_stage, r"2\.weight.*reset_parameters"),
    (refused.too_few_microbatches, "microbatches=1 is smaller than the number of stages.*microbatches >= 2"),
    (refused.partition_of_another_model, r"partition=\[4, 4\] places 8 layers, but the model has 9"),
    (refused.partition_for_more_stages, r"partition=\[3, 3, 3\] is for 3 stages, but there are 2"),
    (refused.train_without_optimizer, r"strategy.training_step needs .*setup_optimizers\(make_optimizer"),
    (refused.other_norm, "norm_type=inf.*2-norm only"),
    (refused.both_clippings, "clip_val and with max_norm.*use one of them"),
    (refused.model_not_called, r"without calling model\(...\)"),
]


def check(outcomes: list[Outcome], error: str, message: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.error == error, f"rank {rank}: {outcome}"
        assert re.search(message, outcome.message, re.DOTALL), f"rank {rank}: {outcome.message}"


def named(cases: list[tuple[Callable[..., Any], str]]) -> Any:
    return pytest.mark.parametrize(("scenario", "message"), cases, ids=[scenario.__name__ for scenario, _ in cases])


@named(CONFIGURATION)
def test_refused_on_every_rank(pools: Pools, scenario: Any, message: str) -> None:
    check(pools.outcomes(2, scenario), "ConfigurationError", message)


@pytest.fixture(scope="module")
def checkpoint(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("fabric") / "two.ckpt")
    pools.run(2, refused.save, path)
    return path


def test_the_checkpoint_of_another_model_is_refused_on_every_rank(pools: Pools, checkpoint: str) -> None:
    for outcome in pools.outcomes(2, refused.load_another_model, checkpoint):
        assert outcome.error in ("RuntimeError", "OtherStageFailedError"), outcome
        assert re.search(r"unexpected \[|missing \[|size mismatch", outcome.message), outcome


@pytest.mark.parametrize("staleness", ["least", pytest.param("uniform", marks=pytest.mark.slow)])
def test_what_drains_is_refused_while_an_update_is_applied(pools: Pools, tmp_path: Path, staleness: Staleness) -> None:
    """And whoever goes on trains as if nothing was."""
    case, path = Case(4, staleness=staleness), tmp_path / "x.ckpt"
    plain = pools.run(2, train, case)
    for before, (after, told) in zip(plain, pools.run(2, refused.during_an_update, case, str(path))):
        assert_equal_weights(after["weights"], before["weights"])
        for (said,) in told:
            assert "while an update is applied" in said
            assert "in a Fabric loop after optimizer.step()" in said
    assert not path.exists()


def test_after_a_failure_collectives_raise(pools: Pools) -> None:
    check(pools.outcomes(2, refused.collective_after_failure), "RuntimeError", "the pipeline failed.*NonFinite")


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'micro_batches'"):
        refused.unknown_argument()

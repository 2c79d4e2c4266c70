"""What cannot be run right is refused on every rank, before a training step ends, with the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LearningRateFinder, ModelPruning, StochasticWeightAveraging

from lightning_asyncpp.errors import ConfigurationError
from tests.helpers.pool import Pools, elastic_environment, free_port
from tests.helpers.programs import run_ranks
from tests.helpers.trainer import CountsSteps, Net, Run, assert_refused, delayed, fit, refusals
from tests.trainer.failures import mistakes as m

MODULES = [
    (m.TwoOptimizers, "more than one optimizer"),
    (m.CallsTwice, "after calling twice self.model"),
    (m.NeverCalls, "without calling self.model"),
    (m.ReturnsNone, "training_step must return a loss with one element"),
    (m.NamedTupleAtTheCut, "a layer at a cut returned the named tuple Named"),
    (m.CompiledInPlace, "self.model was compiled as a whole"),
]


@pytest.mark.parametrize(("module", "found"), MODULES, ids=[module.__name__ for module, _ in MODULES])
def test_a_module_that_no_pipeline_can_run_is_refused(module: Any, found: str) -> None:
    with pytest.raises(ConfigurationError, match=f"(?s){found}"):
        fit(delayed(Run(module, callbacks=((CountsSteps, {}),)), stages=2))


def test_refused_callbacks_are_all_named_at_once() -> None:
    callbacks = (
        (StochasticWeightAveraging, {"swa_lrs": 0.1}),
        (ModelPruning, {"pruning_fn": "l1_unstructured", "amount": 0.5}),
        (LearningRateFinder, {}),
    )
    with pytest.raises(ConfigurationError, match="3 problems") as caught:
        fit(delayed(Run(Net, callbacks=callbacks), stages=2))
    assert all(f"{kind.__name__} cannot work under a pipeline" in str(caught.value) for kind, _ in callbacks)


# -- what one rank alone sees, and all must raise -----------------------------------------------------------------


def test_what_shows_on_one_of_three_stages_all_refuse(pools: Pools) -> None:
    outcomes = refusals(pools, Run(m.CallsTwice), 3)
    assert {outcome.error for outcome in outcomes} == {"ConfigurationError"}


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (m.OtherOrder, "first and the last stage were given different batches"),
        (m.OtherRate, "lr of the optimizer's parameter group 0 is 0.1 on rank 0 and 0.2 on rank 1"),
        (m.OtherSize, "the shape of model."),
    ],
)
def test_what_differs_from_rank_to_rank_is_named_on_all(pools: Pools, module: Any, found: str) -> None:
    assert_refused(refusals(pools, Run(module)), found)


def test_rank_0_says_what_fails_on_another_in_an_evaluation(pools: Pools) -> None:
    """Lightning validates a little before it trains, so that a mistake shows there first."""
    run = Run(m.ValidatesOnOneStage, val_samples=(8,), trainer={"num_sanity_val_steps": 1})
    outcomes = refusals(pools, run, 3)
    assert all(outcome.error for outcome in outcomes)
    assert_refused(outcomes[:1], "stage 0 failed at microbatch 0: LookupError: no such column in the table in the")


SCRIPT = """
import lightning as L
import lightning_asyncpp
from tests.helpers.trainer import Run, loader
from tests.trainer.failures.mistakes import TwoOptimizers

trainer = L.Trainer(accelerator="cpu", devices=2, strategy="async_pipeline", logger=False, enable_progress_bar=False)
run = Run(TwoOptimizers)
trainer.fit(TwoOptimizers(run), loader(run))
"""


def test_a_script_that_no_rank_can_run_shows_one_traceback(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    port = free_port()
    environments = [elastic_environment(rank, 2, port) | {"ASYNCPP_TRACEBACK": ""} for rank in range(2)]
    first, other = run_ranks(["train.py"], tmp_path, environments)
    assert first.returncode
    assert other.returncode
    assert (first.stderr.count("Traceback"), other.stderr.count("Traceback")) == (1, 0), other.stderr
    assert "more than one optimizer" in first.stderr
    assert "as on rank 0, ConfigurationError: " in other.stderr


def test_a_sample_per_replica_is_enough(pools: Pools) -> None:
    """Even if that is fewer samples than microbatches."""
    run = Run(Net, options={"data_parallel_size": 2, "microbatches": 3}, samples=2, shuffle=True)
    assert {result["global_step"] for result in pools.run(4, fit, run)} == {1}

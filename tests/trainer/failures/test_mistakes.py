"""What cannot be run right is refused on every rank, before a training step ends, with the mend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, ModelPruning, StochasticWeightAveraging

from tests.helpers.cases import DIM
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, assert_refused, fit, refusals
from tests.trainer.failures import mistakes as m

SETTINGS = [
    (3, {"microbatches": 2}, ["microbatches=2", "use microbatches >= 3", "sync_pipeline"]),
    (3, {"microbatches": 3, "lookahead": 5}, ["lookahead=5", "the largest is 1", "use microbatches >= "]),
    (2, {"lookahead": -1}, ["lookahead=-1 must be 0 or more"]),
    (3, {"data_parallel_size": 2}, ["devices=3 is not divisible by data_parallel_size=2"]),
    (2, {"nonfinite_gradients": "ignore"}, ["'ignore' must be 'stop' or 'skip'"]),
    (2, {"microbatches": 0, "nonfinite_gradients": "no"}, ["2 problems", "microbatches=0", "nonfinite_gradients"]),
]


@pytest.mark.parametrize(("stages", "options", "parts"), SETTINGS, ids=lambda value: str(value)[:40])
def test_settings(pools: Pools, stages: int, options: dict[str, Any], parts: list[str]) -> None:
    outcomes = refusals(pools, Run(Net, options=options), stages)
    assert {outcome.error for outcome in outcomes} == {"ConfigurationError"}
    assert_refused(outcomes, *parts)


MODULES = [
    (m.TwoOptimizers, ["more than one optimizer", "exactly one update", "MuonAdamW"]),
    (m.NoOptimizerOnOneStage, ["no learning rate is known for this stage"]),
    (m.NoOptimizer, ["configure_optimizers returned no optimizer"]),
    (m.Manual, ["automatic_optimization=False", "use automatic optimization"]),
    (m.Synchronises, ["SyncBatchNorm (1)", "GroupNorm"]),
    (m.ParameterOutside, ["parameters outside the layers of self.model: temperature"]),
    (m.CallsTwice, ["after calling twice self.model"]),
    (m.NeverCalls, ["without calling self.model", "to leave a batch out return a loss of 0"]),
    (m.CallsALayer, ["self.model"]),
    (m.Uncuttable, ["self.model is a Bilinear", "pipeline_layers()"]),
    (m.NoModel, ["NoModel has no self.model", "several attributes (self.first, self.rest)"]),
    (m.NoInitialiser, ["meta tensors without an initialiser: 1.weight", "reset_parameters()"]),
    (m.ReturnsNone, ["training_step must return a loss of one element", "NoneType", "return a loss of 0"]),
    (m.ReturnsNoLoss, ["got a dict with the keys ['value']"]),
    (m.ReturnsVector, ["training_step must return a loss of one element", "shape"]),
    (m.Detached, ["has no gradient"]),
    (m.NoTensors, ["holds no tensor with a batch dimension", "split_batch"]),
    (m.Unequal, ["different first dimensions [4, 8]"]),
    (m.NamedTupleAtTheCut, ["a layer at a cut returned the named tuple Named (layer '0')", "tuples, lists and dict"]),
    (m.Lazy, ["parameters have no shape yet (0.weight, 0.bias, 1.weight, 1.bias)", "run one forward"]),
    (m.CompiledInPlace, ["self.model was compiled as a whole", "layer.compile()"]),
    (m.CompiledModel, ["self.model was compiled as a whole", "layer.compile()"]),
    (m.SumReduction, ["loss_reduction='median' must be 'mean' or 'sum'"]),
]


IN_AN_EVALUATION: list[Any] = [
    (m.NamedTupleAtTheCut, ["stage 0 failed", "a layer at a cut returned the named tuple Named (layer '0')"]),
    (m.ValidatesOnOneStage, ["stage 0 failed at microbatch 0: LookupError: no such column in the table in the"]),
    # The others learn of it five seconds later.
    pytest.param(
        m.MetricOfSeveralNumbers,
        ["self.log('accuracy', ...): compute() of the Metric returned a tensor of shape (3,)"],
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("module", "parts"), IN_AN_EVALUATION)
def test_rank_0_says_what_fails_in_an_evaluation(pools: Pools, module: Any, parts: list[str]) -> None:
    """Lightning validates a little before it trains, so that a mistake shows there first."""
    run = Run(module, val_samples=(8,), trainer={"num_sanity_val_steps": 1})
    outcomes = refusals(pools, run, 3 if module is m.ValidatesOnOneStage else 2)
    assert all(outcome.error for outcome in outcomes)
    assert_refused(outcomes[:1], *parts)


@pytest.mark.parametrize(("module", "parts"), MODULES, ids=[module.__name__ for module, _ in MODULES])
def test_modules(pools: Pools, module: Any, parts: list[str]) -> None:
    assert_refused(refusals(pools, Run(module)), *parts)


@pytest.mark.parametrize("module", [m.CallsTwice, m.ReturnsNone, m.NoTensors])
def test_modules_whose_mistake_shows_on_one_of_three_stages(pools: Pools, module: Any) -> None:
    outcomes = refusals(pools, Run(module), 3)
    assert {outcome.error for outcome in outcomes} == {"ConfigurationError"}


def test_two_optimizers_are_the_only_thing_that_is_wrong_with_one_for_each_stage(pools: Pools) -> None:
    outcomes = refusals(pools, Run(m.OptimizerForEachStage))
    assert_refused(outcomes, "more than one optimizer")


def test_more_stages_than_layers(pools: Pools) -> None:
    parts = ["the model has 2 layers with parameters, fewer than the 3 stages", "use at most 2 devices"]
    assert_refused(refusals(pools, Run(m.TwoLayers), 3), *parts)


def test_other_batches_on_the_last_stage(pools: Pools) -> None:
    assert_refused(
        refusals(pools, Run(m.OtherOrder)), "first and the last stage were given different batches", "shuffling"
    )


def test_other_options_on_one_rank(pools: Pools) -> None:
    expected = "lr of the optimizer's parameter group 0 is 0.1 on rank 0 and 0.2 on rank 1"
    assert_refused(refusals(pools, Run(m.OtherRate)), expected, "start all ranks with the same script")


def test_another_size_on_one_rank(pools: Pools) -> None:
    assert_refused(refusals(pools, Run(m.OtherSize)), "the shape of model.", f"on rank 0 and (2, {DIM}) on rank 1")


TRAINERS = [
    ({"precision": "16-true"}, ["precision='16-true' is not supported", "bf16-mixed"]),
    ({"val_check_interval": "00:00:10:00"}, ["val_check_interval is a time", "number of batches"]),
    ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "agnostic"}, ["gradient_clip_algorithm"]),
]


@pytest.mark.parametrize(
    ("trainer", "parts"), TRAINERS, ids=[str(next(iter(trainer.items()))) for trainer, _ in TRAINERS]
)
def test_trainer_arguments(pools: Pools, trainer: dict[str, Any], parts: list[str]) -> None:
    assert_refused(refusals(pools, Run(Net, trainer=trainer, val_samples=(8,))), *parts)


def test_refused_callbacks_are_all_named_at_once(pools: Pools) -> None:
    callbacks = (
        (StochasticWeightAveraging, {"swa_lrs": 0.1}),
        (ModelPruning, {"pruning_fn": "l1_unstructured", "amount": 0.5}),
        (LearningRateFinder, {}),
    )
    outcomes = refusals(pools, Run(Net, callbacks=callbacks, trainer={"precision": "bf16-true"}))
    assert_refused(outcomes, "3 problems", *[f"{c.__name__} cannot work under a pipeline" for c, _ in callbacks])


def test_a_sample_per_replica_is_enough(pools: Pools) -> None:
    """Even if that is fewer samples than microbatches."""
    run = Run(Net, options={"data_parallel_size": 2, "microbatches": 3}, samples=2, shuffle=True)
    results = pools.run(4, fit, run)
    assert {result["global_step"] for result in results} == {1}


def test_checkpoint_of_other_masters(pools: Pools, tmp_path: Path) -> None:
    saving = ((ModelCheckpoint, {"dirpath": tmp_path}),)
    pools.run(2, fit, Run(Net, callbacks=saving, trainer={"enable_checkpointing": True}))
    path = str(next(tmp_path.glob("*.ckpt")))
    run = Run(
        Net, options={"weight_dtype": "bf16"}, ckpt_path=path, trainer={"max_epochs": 2, "precision": "bf16-mixed"}
    )
    assert_refused(refusals(pools, run, 2), "written with weight_dtype=None, this run has 'bf16'", "load_state_dict")


@pytest.mark.slow
def test_names_without_the_import() -> None:
    """Lightning's own message, which lists the names that it knows."""
    script = "import lightning as L; L.Trainer(strategy='async_pipeline', accelerator='cpu')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode
    assert "invalid strategy name" in done.stderr
    assert "async_pipeline" in done.stderr


def test_unknown_strategy_name() -> None:
    import lightning as L

    with pytest.raises(ValueError, match="invalid strategy name"):
        L.Trainer(strategy="asnyc_pipeline", accelerator="cpu")
    for name in ("async_pipeline", "sync_pipeline"):
        assert (
            type(L.Trainer(strategy=name, accelerator="cpu", devices=2).strategy).__name__.lower().startswith(name[:4])
        )

"""More of what people use with a Trainer: how often it validates, loaders, metrics, clipping, NaN, where it resumes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

from lightning_asyncpp.pipeline.errors import NonFiniteGradientError
from lightning_asyncpp.pipeline.oracle import train_reference
from tests.trainer.modules import WeighingNet
from tests.trainer.pool import Pools
from tests.trainer.reference import assert_equal_weights, batches_of, joined_weights, mini_batches_of, oracle
from tests.trainer.runs import Net, Run, Samples, arrays, evaluate, fit, loader, make_trainer, report, val_loaders
from tests.trainer.test_checkpoints import ResumableNet

# -- which checkpoint ---------------------------------------------------------------------------------------------


def saving(folder: Path, **when: Any) -> Any:
    return (ModelCheckpoint, {"dirpath": folder, "filename": "{step}"} | when)


def test_resumed_from_last(pools: Pools, tmp_path: Path) -> None:
    """Another Trainer with the same ModelCheckpoint finds the newest file by itself, and goes on as if nothing was."""
    run = Run(Net, dropout=0.2, scheduler="decay-step", shuffle=True)
    whole = pools.run(2, fit, replace(run, trainer={"max_epochs": 3}))
    run = replace(run, callbacks=(saving(tmp_path, save_last=True),), ckpt_path="last")
    for epochs, first in ((1, 1), (3, 6)):
        trainer = {"max_epochs": epochs, "enable_checkpointing": True}
        resumed = pools.run(2, fit, replace(run, trainer=trainer))
        assert resumed[0]["steps"][0] == first
    assert_equal_weights(joined_weights(resumed, 2), joined_weights(whole, 2))


def fit_and_return_to_the_best(run: Run) -> dict[str, Any]:
    """``validate(ckpt_path="best")`` after ``fit``, and more training from the best."""
    L.seed_everything(run.seed, verbose=False)
    module, trainer = run.module(run), make_trainer(run)
    trainer.fit(module, loader(run), val_loaders(run))
    at_end = {name: array.copy() for name, array in arrays(dict(module.named_parameters())).items()}
    (validated,) = trainer.validate(module, val_loaders(run), ckpt_path="best", verbose=False)
    best = {name: array.copy() for name, array in arrays(dict(module.named_parameters())).items()}
    callback = trainer.checkpoint_callback
    seen = {"path": Path(callback.best_model_path).name, "score": float(callback.best_model_score)}  # type: ignore
    trainer.fit(module, loader(run), val_loaders(run), ckpt_path="best", weights_only=True)
    return report(trainer, module) | seen | {"at_end": at_end, "best": best, "val_loss": validated["val_loss"]}


def test_back_to_the_best(pools: Pools, tmp_path: Path) -> None:
    """The best is the first of three epochs: the targets are noise."""
    run = Run(Net, callbacks=(saving(tmp_path, monitor="val_loss"),), val_samples=(8,))
    run = replace(run, trainer={"max_epochs": 3, "enable_checkpointing": True})
    results = pools.run(2, fit_and_return_to_the_best, run)
    expected = {epochs: oracle(run, 2, list(mini_batches_of(run, epochs)))[0] for epochs in (1, 3)}
    assert {result["path"] for result in results} == {"step=5.ckpt"}
    for name, epochs in (("at_end", 3), ("best", 1), ("weights", 3)):
        joined = joined_weights([{"weights": result[name]} for result in results], 2)
        assert_equal_weights(joined, expected[epochs])
    for result in results:
        assert result["val_loss"] == pytest.approx(result["score"], rel=1e-6)
        assert result["steps"] == [*range(1, 16), *range(6, 16)]


def test_checkpoints_by_time(pools: Pools, tmp_path: Path) -> None:
    """Rank 0's clock decides for all; a file that was saved in mid-epoch resumes to the same end."""
    callbacks = (saving(tmp_path, train_time_interval=timedelta(microseconds=1), save_top_k=-1),)
    run = Run(ResumableNet, dropout=0.2, trainer={"max_epochs": 2, "enable_checkpointing": True}, callbacks=callbacks)
    whole = pools.run(2, fit, run)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == sorted(f"step={step}.ckpt" for step in range(1, 11))
    batches = list(mini_batches_of(run, 2))
    for step in (2, 7):
        content = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        assert_equal_weights(arrays(content["state_dict"]), oracle(run, 2, batches[:step])[0])
    resumed = pools.run(2, fit, replace(run, callbacks=(), ckpt_path=str(tmp_path / "step=7.ckpt")))
    assert resumed[0]["steps"] == [8, 9, 10]
    assert_equal_weights(joined_weights(resumed, 2), joined_weights(whole, 2))


# -- when it validates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainer", "validated"),
    [
        ({"val_check_interval": 0.5, "max_epochs": 2}, [2, 4, 7, 9]),
        ({"check_val_every_n_epoch": 2, "max_epochs": 5}, [10, 20]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 4, "max_epochs": 2}, [4, 8]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_when_it_validates(pools: Pools, trainer: dict[str, Any], validated: list[int]) -> None:
    """After the same batches as a plain run, on the weights of all updates so far, without a trace in training."""
    run = Run(Net, val_samples=(9,), dropout=0.3, trainer=trainer | {"logger": "list"})
    results = pools.run(2, fit, run)
    (plain,) = pools.run(1, fit, replace(run, strategy="plain"))
    losses, steps = (
        [[value[at] for value in result["records"] if "val_loss" in value[1]] for result in (results[0], plain)]
        for at in (1, 0)
    )
    assert steps[0] == steps[1] == [step - 1 for step in validated]
    batches = list(mini_batches_of(run, trainer["max_epochs"]))
    assert_equal_weights(joined_weights(results, 2), oracle(run, 2, batches)[0])
    for step, metrics in zip(validated, losses[0]):
        assert metrics["val_loss"] == pytest.approx(loss_after(run, batches[:step], 9), rel=1e-5)


def loss_after(run: Run, mini_batches: list[list[Any]], count: int, stages: int = 2) -> float:
    """The oracle's loss over the first validation set of ``count`` samples."""
    module = run.module(run)
    weights, _ = oracle(run, stages, mini_batches)
    module.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    data = Samples(count, 1)
    with torch.no_grad():
        return float(F.mse_loss(module.eval().model(data.x), data.y))  # type: ignore[operator]


# -- loaders ------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Samples without a length."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.samples = Samples(count, seed)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.samples[index] for index in range(len(self.samples)))


class StreamingNet(Net):
    """Nobody knows beforehand which batch is the last, in training and in validation."""

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(self.run.samples), batch_size=self.run.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(Stream(13, 1), batch_size=self.run.batch_size)


@pytest.mark.parametrize("stages", [2, 3])
def test_iterable_dataset(pools: Pools, stages: int) -> None:
    """A middle stage reads it too: only the loader knows when an epoch ends."""
    run = Run(StreamingNet, samples=37, dropout=0.2, trainer={"max_epochs": 2, "logger": "list"})
    results = pools.run(stages, fit, run)
    batches = list(mini_batches_of(run, 2))
    weights, losses = oracle(run, stages, batches)
    assert_equal_weights(joined_weights(results, stages), weights)
    logged = [m["train_loss_step"] for _, m in results[0]["records"] if "train_loss_step" in m]
    assert logged == pytest.approx(losses, rel=1e-6)
    expected = loss_after(run, batches, 13, stages)
    for result in results:
        assert result["steps"] == list(range(1, 11))
        assert result["callback_metrics"]["val_loss"] == pytest.approx(expected, rel=1e-5)


class PairNet(Net):
    """Reads two loaders at once; the second one starts again when it is empty."""

    sizes = (8, 8)

    def train_dataloader(self) -> Any:
        return {name: DataLoader(Samples(n, i), self.sizes[i]) for i, (name, n) in enumerate((("a", 40), ("b", 24)))}

    def micro_batch_weight(self, batch: dict[str, dict[str, Tensor]]) -> float:
        return float(len(batch["a"]["x"]))

    def training_step(self, batch: dict[str, dict[str, Tensor]], batch_idx: int) -> Any:
        out = self.model(batch["a"]["x"] + batch["b"]["x"])
        loss = F.mse_loss(out, batch["a"]["y"])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class UnequalPairNet(PairNet):
    sizes = (8, 4)
    train_dataloader = PairNet.train_dataloader


@pytest.mark.parametrize("stages", [2, 3])
def test_two_loaders_at_once(pools: Pools, stages: int) -> None:
    run = Run(PairNet, trainer={"max_epochs": 2})
    results = pools.run(stages, fit, run)
    loaders = run.module(run).train_dataloader()
    epoch = [[{"a": a, "b": b}] for a, b in zip(loaders["a"], itertools.cycle(loaders["b"]))]
    assert len(epoch) == 5
    assert_equal_weights(joined_weights(results, stages), oracle(run, stages, epoch * 2)[0])


def test_two_loaders_with_batches_of_different_sizes_are_refused(pools: Pools) -> None:
    for outcome in pools.outcomes(2, fit, Run(UnequalPairNet)):
        assert outcome.error == "ConfigurationError", outcome.trace
        assert "different first dimensions [4, 8]" in outcome.message
        assert "split_batch" in outcome.message


class CuttingNet(WeighingNet):
    """Batches with a tensor that is not batched, cut by the module into pieces of different sizes."""

    def train_dataloader(self) -> Any:
        def with_shift(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            batch = torch.utils.data.default_collate(samples)
            return batch | {"shift": batch["x"].mean(dim=0)}  # (DIM,)

        return DataLoader(Samples(40), batch_size=8, collate_fn=with_shift)

    def split_batch(self, batch: dict[str, Tensor], parts: int) -> list[Any]:
        x, ends = batch["x"] + batch["shift"], [1, 3, 8][-parts:]
        return [{"x": x[a:b], "y": batch["y"][a:b]} for a, b in zip([0, *ends], ends)]


@pytest.mark.parametrize("stages", [2, 3])
def test_a_module_that_cuts_and_weighs(pools: Pools, stages: int) -> None:
    run = Run(CuttingNet, trainer={"logger": "list"})
    results = pools.run(stages, fit, run)
    module = run.module(run)
    pieces = [module.split_batch(batch, stages) for batch in module.train_dataloader()]
    assert len({len(piece["x"]) for piece in pieces[0]}) == stages
    weights, losses = oracle(run, 1, pieces)  # its own cut leaves a piece whole
    assert_equal_weights(joined_weights(results, stages), weights)
    logged = [m["train_loss_step"] for _, m in results[0]["records"] if "train_loss_step" in m]
    assert logged == pytest.approx(losses, rel=1e-6)


# -- metrics ------------------------------------------------------------------------------------------------------


class CollectionNet(Net):
    """Logs collections of metrics with ``log_dict``; in validation two of them share their state."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.seen = MetricCollection({"mse": MeanSquaredError(), "mae": MeanAbsoluteError()}, prefix="train_")
        errors = {"mse": MeanSquaredError(), "rmse": MeanSquaredError(squared=False), "mae": MeanAbsoluteError()}
        self.validated = MetricCollection(errors, prefix="val_")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        out = self.model(batch["x"])
        self.seen(out, batch["y"])
        self.log_dict(self.seen, on_step=False, on_epoch=True)
        return F.mse_loss(out, batch["y"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validated.update(self.model(batch["x"]), batch["y"])
        self.log_dict(self.validated)


def test_metric_collection(pools: Pools) -> None:
    """The values of every epoch are those of a plain run, on all ranks."""
    run = Run(CollectionNet, "sync", optimizer="sgd", samples=37, val_samples=(13,))
    run = replace(run, trainer={"max_epochs": 3, "logger": "list"})
    results = pools.run(2, fit, run)
    (plain,) = pools.run(1, fit, replace(run, strategy="plain"))
    for name in ("train_mse", "train_mae", "val_mse", "val_rmse", "val_mae"):
        mine, theirs = ([m[name] for _, m in r["records"] if name in m] for r in (results[0], plain))
        assert len(mine) == 3
        assert mine == pytest.approx(theirs, rel=1e-4), name
        assert results[1]["callback_metrics"][name] == pytest.approx(mine[-1], rel=1e-6)
    assert results[0]["callback_metrics"]["val_rmse"] ** 2 == pytest.approx(
        results[0]["callback_metrics"]["val_mse"], rel=1e-5
    )


# -- NaN ----------------------------------------------------------------------------------------------------------


class PoisonedNet(Net):
    """One sample of the third batch is NaN."""

    def train_dataloader(self) -> Any:
        data = Samples(self.run.samples)
        data.x[20] = float("nan")
        return DataLoader(data, batch_size=self.run.batch_size)


def fit_and_listen(run: Run) -> dict[str, Any]:
    """What the run came to, what it warned of, and the weights it was left with."""
    L.seed_everything(run.seed, verbose=False)
    module, trainer = run.module(run), make_trainer(run)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module)
        except NonFiniteGradientError as raised:
            error = f"{type(raised).__name__}: {raised}"
    warned = [str(warning.message) for warning in caught if "NaN" in str(warning.message)]
    return {"weights": arrays(dict(module.named_parameters())), "warned": warned, "error": error} | {
        "steps": trainer.global_step
    }


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_batch_whose_gradient_is_not_finite_is_skipped(pools: Pools, strategy: str) -> None:
    run = Run(PoisonedNet, strategy, {"nonfinite_gradients": "skip"}, trainer={"gradient_clip_val": 0.5})
    results = pools.run(2, fit_and_listen, run)
    module = run.module(run)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    train_reference(
        module.model, lambda batch: module.training_step(batch, 0), [[batch] for batch in module.train_dataloader()],
        run.make_base(list(module.named_parameters())), micro_batches=2, delay=0 if strategy == "sync" else 1,
        max_norm=0.5, weight=lambda batch: float(len(batch["x"])), skip_nonfinite=True, seed=run.seed,
    )  # fmt: skip
    weights = arrays(dict(module.named_parameters()))
    assert all(np.isfinite(array).all() for array in weights.values())
    assert_equal_weights(joined_weights(results, 2), weights)
    assert [result["steps"] for result in results] == [5, 5]
    assert len(results[0]["warned"]) == 1
    assert "mini-batch 2: its gradient holds NaN or Inf; the update was skipped" in results[0]["warned"][0]


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_gradient_that_is_not_finite_stops_all_ranks(pools: Pools, strategy: str) -> None:
    """The default; the weights are those before the update that it would have been."""
    run = Run(PoisonedNet, strategy)
    results = pools.run(2, fit_and_listen, run)
    for result in results:
        assert "NonFiniteGradientError: the gradient of mini-batch 2 holds NaN or Inf" in result["error"]
        assert "nonfinite_gradients='skip'" in result["error"]
    assert_equal_weights(joined_weights(results, 2), oracle(run, 2, [[b] for b in batches_of(run, 0)[:2]])[0])


# -- clipping -----------------------------------------------------------------------------------------------------


class ClippingNet(Net):
    """Decides by itself how gradients are clipped."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_module_that_clips_by_itself(pools: Pools, strategy: str) -> None:
    """``self.clip_gradients`` clips by the norm over all stages."""
    run = Run(ClippingNet, strategy, optimizer="sgd", trainer={"max_epochs": 2})
    results = pools.run(2, fit, run)
    clipped, whole = (oracle(run, 2, list(mini_batches_of(run, 2)), max_norm=norm)[0] for norm in (0.05, None))
    assert_equal_weights(joined_weights(results, 2), clipped)
    assert any(not np.array_equal(clipped[name], whole[name]) for name in clipped)


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_clipping_by_value(pools: Pools, strategy: str) -> None:
    """Every element on its own: no stage has to know of another."""
    run = Run(Net, strategy, optimizer="sgd")
    trainer = {"max_epochs": 2, "gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
    results = pools.run(2, fit, replace(run, trainer=trainer))

    def clip_first(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_value_(parameters, 0.02))
        return lambda: None

    batches = list(mini_batches_of(run, 2))
    clipped, whole = oracle(run, 2, batches, after_update=clip_first)[0], oracle(run, 2, batches)[0]
    assert_equal_weights(joined_weights(results, 2), clipped)
    assert any(not np.array_equal(clipped[name], whole[name]) for name in clipped)


# -- collectives --------------------------------------------------------------------------------------------------

COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "reduce", "scatter",
)  # fmt: skip


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """The names of the collectives that are called meanwhile, also by Lightning and torchmetrics."""
    called: list[str] = []

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return function(*args, **kwargs)

        return call

    originals = {name: getattr(dist, name) for name in COLLECTIVES}
    for name, function in originals.items():
        setattr(dist, name, counting(name, function))
    try:
        yield called
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


class BarrierPerBatch(L.Callback):
    """What must not happen."""

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.strategy.barrier()


def count_in_evaluation(run: Run, what: str) -> list[str]:
    with counted_collectives() as called:
        evaluate(run, what)
    return called


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_collectives_of_an_evaluation_do_not_grow_with_its_batches(pools: Pools, what: str) -> None:
    few, many = (pools.run(2, count_in_evaluation, Run(Net, val_samples=(8 * n,)), what) for n in (2, 12))
    assert few == many
    assert few[0]


def test_collectives_are_counted(pools: Pools) -> None:
    run = Run(Net, callbacks=((BarrierPerBatch, {}),))
    few, many = (pools.run(2, count_in_evaluation, replace(run, val_samples=(8 * n,)), "validate") for n in (2, 12))
    assert [len(b) - len(a) for a, b in zip(few, many)] == [10, 10]


class CountsInValidation(L.Callback):
    """Counts the collectives between the first and the last hook of a validation in training."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def on_validation_start(self, *args: Any) -> None:
        self.context = counted_collectives()
        self.called = self.context.__enter__()

    def on_validation_end(self, *args: Any) -> None:
        self.context.__exit__(None, None, None)
        self.calls.append(len(self.called))


def fit_and_count(run: Run) -> list[int]:
    counts = CountsInValidation()
    L.seed_everything(run.seed, verbose=False)
    make_trainer(run, callbacks=[counts]).fit(run.module(run), loader(run), val_loaders(run))
    return counts.calls


def test_collectives_of_a_validation_in_training(pools: Pools) -> None:
    """One exchange at the loader's end, however many batches it has."""
    run = Run(Net, trainer={"max_epochs": 2})
    few, many = (pools.run(2, fit_and_count, replace(run, val_samples=(8 * n,))) for n in (2, 12))
    assert few == many
    assert [len(calls) for calls in few] == [2, 2]
    assert all(count > 0 for calls in few for count in calls)

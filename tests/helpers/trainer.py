"""Scenarios for the ranks of a pool, or for one process: Trainer runs made from a description."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_asyncpp import AsyncPipelineStrategy, DelayedGradientStrategy, SyncPipelineStrategy
from lightning_asyncpp.optim import SOAP, ErrorFeedback, NorMuonAdamW, WeightPrediction
from tests.helpers.cases import DIM, OPTIMIZERS, decay, make_model
from tests.helpers.pool import Outcome, Pools

BASES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **OPTIMIZERS,
    "sgd": functools.partial(torch.optim.SGD, lr=0.05),
    "normuon": functools.partial(NorMuonAdamW, lr=0.02, newton_schulz_dtype="float32"),
    "soap": functools.partial(SOAP, lr=0.02, precondition_frequency=3),
}
CORRECTIONS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "feedback": ErrorFeedback,
    "prediction": WeightPrediction,
    "prediction-ahead": functools.partial(WeightPrediction, ahead=1.0),
}


@dataclass(frozen=True)
class Run:
    """Description of one Trainer run."""

    module: Callable[[Run], L.LightningModule]
    strategy: str = "async"  # a key of STRATEGIES or of LIGHTNINGS_OWN
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the strategy
    trainer: dict[str, Any] = field(default_factory=dict)  # arguments of the Trainer
    callbacks: tuple[tuple[Callable[..., L.Callback], dict[str, Any]], ...] = ()  # classes with their arguments
    optimizer: str = "adamw"
    error_feedback: bool = False
    correction: str = ""
    scheduler: str = ""
    dropout: float = 0.0
    dataset: str = "samples"
    samples: int = 40
    batch_size: int = 8
    val_samples: tuple[int, ...] = ()
    shuffle: bool = False
    seed: int = 5
    ckpt_path: str | None = None

    def make_base(self, parameters: Any) -> torch.optim.Optimizer:
        return BASES[self.optimizer](parameters)

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if name := self.correction or ("feedback" if self.error_feedback else ""):
            return CORRECTIONS[name](parameters, base=BASES[self.optimizer])
        return self.make_base(parameters)


def delayed(run: Run, **options: Any) -> Run:
    """Return the run with all stages in one process; with one stage, the default, gradients are one update old."""
    return replace(run, strategy="delayed", options=options)


def staged(run: Run, stages: int = 3) -> Run:
    """Return the run with its stages in one process, where its results are bitwise the same."""
    options = {"microbatches": stages, **run.options, "stages": stages, "delay": int(run.strategy != "sync")}
    if run.strategy == "async":
        options.setdefault("staleness", "uniform")
    return delayed(run, **options)


def train(run: Run) -> dict[str, Any]:
    """Fit in this process, by default with a :class:`ListLogger`."""
    return fit(replace(run, trainer={"logger": "list"} | run.trainer))


class Samples(Dataset):
    """Dataset of random inputs and targets, the same in every process."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(100 + seed)
        self.x = torch.randn(count, DIM, generator=generator)
        self.y = torch.randn(count, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Net(L.LightningModule):
    """Ordinary LightningModule around an ``nn.Sequential``, without any code for pipelines."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.model: nn.Module = make_model(run.dropout)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a training step."""
        return F.mse_loss(self.model(batch["x"]), batch["y"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", F.mse_loss(self.model(batch["x"]), batch["y"]), prog_bar=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", F.mse_loss(self.model(batch["x"]), batch["y"]))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["x"])

    def configure_optimizers(self) -> Any:
        optimizer = self.run.make_optimizer(list(self.named_parameters()))
        scheduler = make_scheduler(self.run, optimizer)
        return optimizer if scheduler is None else {"optimizer": optimizer, "lr_scheduler": scheduler}


def make_scheduler(run: Run, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Return Lightning's ``lr_scheduler`` for ``kind-interval`` or ``plateau-interval-metric``, or None."""
    if not run.scheduler:
        return None
    kind, interval, *monitor = run.scheduler.split("-")
    if kind == "plateau":
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
        return {"scheduler": plateau, "interval": interval, "monitor": monitor[0]}
    return {"scheduler": decay(optimizer), "interval": interval}


def scratch() -> str:
    """Return this process's folder for checkpoints that nobody reads; other processes save under the same names."""
    return os.path.join(tempfile.gettempdir(), "lightning_asyncpp-tests", str(os.getpid()))


class ListLogger(Logger):
    """Logger that keeps metrics in a list, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "list"

    @property
    def version(self) -> int:
        return 0

    @property
    def save_dir(self) -> str:
        return scratch()

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the hyperparameters."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.records.append((int(step or 0), {name: float(value) for name, value in metrics.items()}))


LOGGERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda _: ListLogger(),
    "files": lambda folder: [CSVLogger(folder, flush_logs_every_n_steps=1), TensorBoardLogger(folder)],
}


class Watch(L.Callback):
    """Callback that records what callbacks see, such as metrics and learning rates after every training batch."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.steps: list[int] = []
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.full: dict[str, np.ndarray] = {}

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if hasattr(trainer.strategy, "full_state_dict"):
            self.full = arrays(trainer.strategy.full_state_dict())

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.metrics.append(plain_metrics(trainer))
        self.steps.append(trainer.global_step)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.losses.append(float(outputs["loss"]) if outputs else float("nan"))  # a skipped batch has no outputs


def plain_metrics(trainer: L.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class Tokens(Dataset):
    """Dataset of random token sequences with some padding."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(100 + seed)
        self.tokens = torch.randint(0, 32, (count, 9), generator=generator)
        self.tokens[::5, 6:] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


DATASETS: dict[str, Callable[..., Dataset]] = {"samples": Samples, "tokens": Tokens}


def loader(run: Run, count: int | None = None, seed: int = 0, shuffle: bool = False) -> DataLoader:
    data = DATASETS[run.dataset](run.samples if count is None else count, seed)
    return DataLoader(data, batch_size=run.batch_size, shuffle=shuffle)


def val_loaders(run: Run) -> list[DataLoader]:
    return [loader(run, count, seed) for seed, count in enumerate(run.val_samples, 1)]


STRATEGIES: dict[str, Callable[..., Any]] = {
    "default": AsyncPipelineStrategy,
    "async": functools.partial(AsyncPipelineStrategy, staleness="uniform"),  # gradients are one update old
    "sync": SyncPipelineStrategy,
    "delayed": DelayedGradientStrategy,
}
LIGHTNINGS_OWN = {"plain": "auto", "ddp": "ddp"}


def make_strategy(run: Run) -> Any:
    """Return the run's strategy, by default with as many microbatches as stages: half the usual default, and faster."""
    if run.strategy in LIGHTNINGS_OWN:
        return LIGHTNINGS_OWN[run.strategy]
    processes = int(os.environ.get("WORLD_SIZE", 1))
    stages = run.options.get("stages", processes // run.options.get("data_parallel_size", 1))
    return STRATEGIES[run.strategy](**{"microbatches": max(stages, 1), **run.options})


def make_trainer(run: Run, **more: Any) -> L.Trainer:
    processes = 1 if run.strategy == "plain" else int(os.environ.get("WORLD_SIZE", 1))
    devices = min(processes, int(os.environ.get("LOCAL_WORLD_SIZE", processes)))
    arguments: dict[str, Any] = {
        "max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "log_every_n_steps": 1, "num_sanity_val_steps": 0,
        "use_distributed_sampler": run.shuffle,  # Lightning's sampler shuffles every training loader
        "default_root_dir": scratch(),
    }  # fmt: skip
    arguments |= run.trainer | more
    if isinstance(kind := arguments["logger"], str):
        arguments["logger"] = LOGGERS[kind](arguments["default_root_dir"])
    callbacks = [*arguments.pop("callbacks", []), *(make(**kwargs) for make, kwargs in run.callbacks), Watch()]
    return L.Trainer(
        accelerator="cpu", devices=devices, num_nodes=processes // devices, strategy=make_strategy(run),
        callbacks=callbacks, **arguments,
    )  # fmt: skip


def own_state(module: L.LightningModule) -> dict[str, np.ndarray]:
    """Return this rank's part of the module's state."""
    return arrays(dict(module.state_dict()))


def fit(run: Run) -> dict[str, Any]:
    """Train, and return a report of what can be seen afterwards."""
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    trainer = make_trainer(run)
    vals = val_loaders(run)
    own = "train_dataloader" in vars(type(module))
    trainer.fit(
        module,
        None if own else loader(run, shuffle=run.shuffle),
        vals or None,
        ckpt_path=run.ckpt_path,
        weights_only=True,
    )
    return report(trainer, module)


def evaluate(run: Run, what: str, weights: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
    """Run ``trainer.validate``, ``test`` or ``predict`` on the validation sets, or on the training set if none."""
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    if weights is not None:
        module.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    trainer = make_trainer(run)
    loaders = val_loaders(run) or [loader(run)]
    if what == "predict":
        returned = trainer.predict(module, loaders)
        written = [c.written for c in trainer.callbacks if hasattr(c, "written")]  # type: ignore[attr-defined]
        return {
            "returned": returned and [None if batch is None else batch.numpy() for batch in returned],
            "written": written and written[0],
        }
    return {"returned": getattr(trainer, what)(module, loaders, verbose=False)}


def initial_weights(run: Run) -> dict[str, np.ndarray]:
    """Return the weights of this rank before the first step."""
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    at_start = KeepAtStart()
    make_trainer(run, callbacks=[at_start], max_epochs=1, limit_train_batches=1).fit(module, loader(run))
    return at_start.weights


class KeepAtStart(L.Callback):
    """Callback that keeps the weights from which training starts."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.weights = {name: array.copy() for name, array in arrays(dict(module.named_parameters())).items()}


def report(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    watch = next(c for c in trainer.callbacks if isinstance(c, Watch))  # type: ignore[attr-defined]
    records = [record for log in trainer.loggers if isinstance(log, ListLogger) for record in log.records]
    return {
        "weights": arrays(dict(module.named_parameters())),
        "dtypes": {name: str(p.dtype).removeprefix("torch.") for name, p in module.named_parameters()},
        "full_at_end": watch.full,
        "full_afterwards": arrays(trainer.strategy.full_state_dict()) if watch.full else {},
        "buffers": arrays(dict(module.named_buffers())),
        "callback_metrics": plain_metrics(trainer),
        "logged": sorted(trainer.logged_metrics),
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "records": records,
        "metrics": watch.metrics,
        "steps": watch.steps,
        "rates": watch.rates,
        "losses": watch.losses,
        "best": getattr(trainer.checkpoint_callback, "best_model_path", ""),
    }


def arrays(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Return NumPy arrays, which processes send by value; floats as float32, since NumPy lacks bfloat16."""
    return {name: (t.float() if t.is_floating_point() else t).detach().cpu().numpy() for name, t in tensors.items()}


class CountsSteps(L.Callback):
    """Callback that fails if a training batch ends, since every mistake must be found before."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a training step was run")


def refusals(pools: Pools, run: Run, stages: int = 2) -> list[Outcome]:
    """Run a training that must fail, and return the outcome of every rank."""
    run = replace(run, callbacks=(*run.callbacks, (CountsSteps, {})))
    return pools.outcomes(stages, fit, run)


def assert_refused(outcomes: list[Outcome], *parts: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.error, f"rank {rank} did not fail"
        missing = [part for part in parts if part not in outcome.message]
        assert not missing, f"rank {rank}: {missing} not in: {outcome.error}: {outcome.message}"

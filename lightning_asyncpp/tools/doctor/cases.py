"""Small trainings whose result is known, each through the Trainer, as a pipeline or as the emulator of its delay."""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_asyncpp.core.emulator.gradient_delay import Delay
from lightning_asyncpp.core.schedule import Staleness
from lightning_asyncpp.models import GPTConfig
from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW
from lightning_asyncpp.trainer import (
    AsyncPipelineStrategy,
    DelayedGradientStrategy,
    GPTModule,
    SyncPipelineStrategy,
)

MICRO_BATCHES = 4
SAMPLES = 8
"""Of a mini-batch, in each replica."""
DIM, VOCABULARY, CONTEXT = 16, 64, 12
_SAVED_STEP = 5
_TIMEOUT = timedelta(seconds=60)
"""Of a wait for another rank: a message that never comes shall end these trainings with an error, which says more."""


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        title: what it shows.
        model: a chain of layers, or a GPT with tied embeddings and dropout, or one without either.
        tolerance: on GPUs, how much a weight may differ, as a share of the largest change in its tensor; on CPUs none.
        staleness: of ``async_pipeline``; ``None`` for ``sync_pipeline``.
        optimizer: SGD with momentum, AdamW, or Muon with Error Feedback.
        trainer: arguments of the Trainer.
        samples: of the training set; its last batch may be short.
        validates: whether there is a validation set.
        waits: whether a callback waits for the whole device after every batch, as some of Lightning's own do.
        saves: whether a callback saves a checkpoint amid the run.
    """

    title: str
    model: Literal["layers", "tied", "gpt"] = "layers"
    tolerance: float = 1e-3
    staleness: Staleness | None = "least"
    optimizer: Literal["sgd", "adamw", "muon"] = "sgd"
    trainer: dict[str, Any] = field(default_factory=dict)
    samples: int = 64
    validates: bool = False
    waits: bool = False
    saves: bool = False


_VALIDATIONS: dict[str, Any] = {"gradient_clip_val": 0.1, "val_check_interval": 3}

CASES = {
    "layers": Case("a chain of layers, PipeDream-2BW", staleness="uniform"),
    "flushed": Case("the same with a flush per mini-batch", staleness=None),
    "tied": Case(
        "a GPT with tied embeddings, dropout, clipping, a short last batch, validations and a checkpoint amid the run",
        "tied", trainer=_VALIDATIONS, samples=61, validates=True, waits=True, saves=True,
    ),
    # Its state has moments where the weights are, and counts of steps on the host.
    "adamw": Case("a chain of layers, AdamW, a checkpoint amid the run", "layers", 2e-2, optimizer="adamw", saves=True),
    "feedback": Case("a GPT, Muon with Error Feedback, clipping", "gpt", 2e-2, optimizer="muon", trainer=_VALIDATIONS),
}  # fmt: skip
"""What every pipeline trains."""

REPLICATED = ("layers", "feedback")
"""What replicas train: dropout would differ from that of one process."""


def fit(case: Case, place: Place, folder: Path) -> dict[str, Any]:
    """Train, and say what came of it: on rank 0 the whole model.

    Args:
        case: what is trained.
        place: where.
        folder: for the checkpoint, which is not kept; the same on all ranks.
    """
    L.seed_everything(7, verbose=False)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    watch = _Watch(case.waits, folder / "saved.ckpt" if case.saves else None)
    trainer = make_trainer(case, place, [watch])
    samples_per_batch = SAMPLES * place.together
    module = _module(case)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(
            module, _loader(case, case.samples, 0, samples_per_batch),
            _loader(case, 12, 1, samples_per_batch) if case.validates else None,
        )  # fmt: skip
    strategy: Any = trainer.strategy
    state = module.state_dict() if place.alone else strategy.full_state_dict()
    return {
        "weights": {name: value.detach().cpu().clone() for name, value in state.items()},
        "start": watch.start,
        "saved": watch.saved,
        "route": watch.route,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "seconds": time.perf_counter() - started,
    }


def make_trainer(case: Case, place: Place, callbacks: list[L.Callback]) -> L.Trainer:
    """The Trainer of a case at a place."""
    return L.Trainer(
        accelerator="cuda" if place.is_gpu else "cpu",
        # Lightning refuses more GPUs than there are, also where the strategy names one several times.
        devices=1 if place.route == "shared" else place.devices,
        num_nodes=place.nodes, strategy=place.strategy(case), plugins=[LightningEnvironment()],
        callbacks=callbacks, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, **case.trainer,
    )  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a training runs.

    Attributes:
        route: ``"cpu"``; ``"shared"``: all ranks on the first GPU, through the host; ``"nccl"``: a GPU for each;
            ``"nccl on one GPU"``: all on one over NCCL, each as if it were a machine of its own.
        stages: P.
        replicas: D.
        alone: whether a single process emulates the delay of such a pipeline, and trains what all replicas do.
    """

    route: Literal["cpu", "shared", "nccl", "nccl on one GPU"]
    stages: int
    replicas: int = 1
    alone: bool = False

    @property
    def is_gpu(self) -> bool:
        """Whether tensors are on GPUs."""
        return self.route != "cpu"

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return 1 if self.alone else self.stages * self.replicas

    @property
    def together(self) -> int:
        """Replicas whose batches one process trains."""
        return self.replicas if self.alone else 1

    @property
    def nodes(self) -> int:
        """Machines, as the Trainer sees them."""
        return self.ranks if self.route == "nccl on one GPU" else 1

    @property
    def devices(self) -> int:
        """Of each of them."""
        return self.ranks // self.nodes

    def strategy(self, case: Case) -> Any:
        """What trains a case there."""
        staleness, micro_batches = self._staleness(case), MICRO_BATCHES * self.together
        if self.alone:
            delay: Delay = "least" if staleness == "least" else int(staleness is not None)
            stages = self.stages if staleness == "least" else None
            return DelayedGradientStrategy(delay=delay, stages=stages, micro_batches=micro_batches)
        shared = [torch.device("cuda", 0)] * self.ranks if self.route == "shared" else None
        options: dict[str, Any] = {"micro_batches": micro_batches, "data_parallel_size": self.replicas}
        options |= {"parallel_devices": shared, "timeout": _TIMEOUT}
        if staleness is None:
            return SyncPipelineStrategy(**options)
        if staleness != "least":  # which is the default, and that is what is examined
            options["staleness"] = staleness
        return AsyncPipelineStrategy(**options)

    def _staleness(self, case: Case) -> Staleness | None:
        # Each replica holds micro-batches of its own back, which one process with the batches of all cannot do.
        return "uniform" if self.replicas > 1 and case.staleness == "least" else case.staleness


class _Watch(L.Callback):
    """Keeps the weights at the start and how tensors travel; waits for the device and saves where it shall."""

    def __init__(self, waits: bool, checkpoint: Path | None) -> None:
        self.start: dict[str, Tensor] = {}
        self.saved: dict[str, Tensor] = {}
        self.route = ""
        self._waits, self._checkpoint = waits, checkpoint

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look."""
        self.start = {name: value.detach().cpu().clone() for name, value in pl_module.state_dict().items()}
        if (session := getattr(trainer.strategy, "session", None)) is not None:
            self.route = session.describe()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Wait, and save."""
        if self._waits and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if self._checkpoint is not None and trainer.global_step == _SAVED_STEP:
            trainer.save_checkpoint(self._checkpoint)
            if trainer.is_global_zero:
                self.saved = tensors_of(torch.load(self._checkpoint, "cpu", weights_only=False))
                self._checkpoint.unlink()


def tensors_of(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights and optimizer state in a checkpoint, of a pipeline or of one process."""
    found = {name: value.clone() for name, value in checkpoint["state_dict"].items()}
    for saved in checkpoint["optimizer_states"]:
        for key, state in saved["state"].items():
            for entry, value in state.items():
                if value is not None:
                    found[f"{entry} of {key}"] = torch.as_tensor(value).clone()
    return found


class _Layers(L.LightningModule):
    """Layers of every kind that has weights in a product or beside one."""

    def __init__(self, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self._make_optimizer = make_optimizer
        self.model = nn.Sequential(
            nn.Linear(DIM, 32), nn.Tanh(), nn.RMSNorm(32), nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32),
            nn.Linear(32, 1),
        )  # fmt: skip

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of a micro-batch (samples, DIM)."""
        loss = F.mse_loss(self.model(batch), batch.square().mean(1, keepdim=True))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """That of the case."""
        return self._make_optimizer(self.model.named_parameters())


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    # Nothing in it makes roundings larger.
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _muon(parameters: Any) -> torch.optim.Optimizer:
    return ErrorFeedback(parameters, base=functools.partial(MuonAdamW, lr=0.01, newton_schulz_dtype="float32"))


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"sgd": _sgd, "adamw": _adamw, "muon": _muon}


def _module(case: Case) -> L.LightningModule:
    if case.model == "layers":
        return _Layers(_OPTIMIZERS[case.optimizer])
    tied = case.model == "tied"
    config = GPTConfig(
        vocab_size=VOCABULARY, context_length=CONTEXT, num_layers=3, dim=32, num_heads=4, tie_embeddings=tied,
        dropout=0.1 if tied else 0.0,
    )  # fmt: skip
    return GPTModule(config, _OPTIMIZERS[case.optimizer], decay="constant")


def _loader(case: Case, samples: int, seed: int, samples_per_batch: int) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    if case.model == "layers":
        data = torch.randn(samples, DIM, generator=generator)
    else:
        data = torch.randint(VOCABULARY, (samples, CONTEXT + 1), generator=generator)
    return DataLoader(list(data), samples_per_batch)  # type: ignore[arg-type]

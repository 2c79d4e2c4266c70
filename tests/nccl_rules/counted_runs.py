"""Scenarios: Trainer runs whose waits of the host are counted, over a few mini-batches far from start and end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning as L
import torch
from torch import Tensor

from lightning_asyncpp import AsyncPipelineStrategy, GPTModule, PipelineMonitor, SyncPipelineStrategy
from lightning_asyncpp.core.wire import transport
from lightning_asyncpp.core.wire.transport import Arrival, Transport
from lightning_asyncpp.models import GPTConfig, MoEConfig
from tests.helpers.trainer import ListLogger, Net, Run, loader
from tests.nccl_rules.host_waits import DEVICE, HostWaits, Wait, put_on_device

FIRST, LAST = 5, 6  # of the mini-batches that are counted; the first few are looked at more closely
MICROBATCHES = 4


@dataclass(frozen=True)
class Counted:
    """A run of it.

    Attributes:
        module: ``"net"``, an ordinary LightningModule; ``"gpt"``; or ``"experts"``.
        options: of the strategy.
        logs: with a logger and the progress bar.
        clip: the gradient's largest norm.
        synchronous: without a delay.
        optimizer: a name in :mod:`tests.helpers.trainer`.
        correction: another.
        trainer: further arguments of the Trainer.
        saves: instead of the mini-batches, checkpoints after them are watched: whole ones of a run that goes on.
    """

    module: str = "net"
    options: dict[str, Any] = field(default_factory=dict)
    logs: bool = False
    clip: float | None = None
    synchronous: bool = False
    optimizer: str = "adamw"
    correction: str = ""
    trainer: dict[str, Any] = field(default_factory=dict)
    saves: bool = False


class Found(NamedTuple):
    """What was counted on a rank: waits per mini-batch, what a GPU refuses, and reads of what is being copied."""

    waits: dict[Wait, float]
    mixed: dict[Wait, int]
    early: dict[Wait, int]


class _Async(AsyncPipelineStrategy):
    root_device = DEVICE  # type: ignore[assignment]


class _Sync(SyncPipelineStrategy):
    root_device = DEVICE  # type: ignore[assignment]


class _Counting(L.Callback):
    """Counts from the end of a mini-batch to the end of another one, or while checkpoints are saved between them.

    Args:
        waits: that count.
        batches: per mini-batch.
        saves: whether it is the checkpoints.
    """

    def __init__(self, waits: HostWaits, batches: int, saves: bool) -> None:
        self._waits, self._batches, self._saves = waits, batches, saves

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._waits.counting = FIRST <= (batch_idx + 1) // self._batches <= LAST
        if self._saves and self._waits.counting:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / f"{batch_idx}.ckpt")
            self._waits.counting = False


def count(counted: Counted) -> Found:
    """Train, and return what was counted on this rank."""
    dataset = "tokens" if counted.module in ("gpt", "experts", "tied") else "samples"
    run = Run(MODULES[counted.module], optimizer=counted.optimizer, correction=counted.correction, dataset=dataset,
              batch_size=8)  # fmt: skip
    waits, kind = HostWaits(), _Sync if counted.synchronous else _Async
    world, quiet = int(os.environ["WORLD_SIZE"]), {"enable_checkpointing": False, "enable_model_summary": False}
    batches = counted.trainer.get("accumulate_grad_batches", 1)
    callbacks: list[L.Callback] = [_Counting(waits, batches, counted.saves)]
    callbacks += [PipelineMonitor(every_n_batches=1)] if dataset == "tokens" else []
    with waits.watching(), _received_on_device(), tempfile.TemporaryDirectory() as folder:
        L.seed_everything(5, verbose=False)
        strategy = kind(**{"microbatches": MICROBATCHES, **counted.options})
        trainer = L.Trainer(
            accelerator="cpu", devices=world, strategy=strategy, callbacks=callbacks, max_epochs=1, **quiet,
            logger=ListLogger() if counted.logs else False, enable_progress_bar=counted.logs, log_every_n_steps=1000,
            gradient_clip_val=counted.clip, use_distributed_sampler=False, default_root_dir=folder,
            **counted.trainer,
        )  # fmt: skip
        trainer.fit(run.module(run), loader(run, count=(LAST + 3) * batches * run.batch_size))
    per_batch = {wait: number / (LAST - FIRST + 1) for wait, number in waits.waits.items()}
    return Found(per_batch, dict(waits.mixed), dict(waits.early))


@contextmanager
def _received_on_device() -> Iterator[None]:
    """What goes over sockets is read and arrives where it lies, on a CPU: NCCL takes it from a GPU, to another."""
    activation, gradients = Transport.receive_activation, Transport.receive_gradients

    def receive_activation(*args: Any) -> Arrival:
        arrival = activation(*args)
        put_on_device(arrival.tensors)
        return arrival

    def receive_gradients(*args: Any) -> list[Tensor]:
        return put_on_device(gradients(*args))

    with (
        patch.object(Transport, "receive_activation", receive_activation),
        patch.object(Transport, "receive_gradients", receive_gradients),
        patch.object(
            transport, "_bytes_of", lambda tensor: transport.memory_of(tensor.detach().contiguous()).numpy().data
        ),
    ):
        yield


def _gpt(run: Run, moe: MoEConfig | None = None, tied: bool = False) -> GPTModule:
    config = GPTConfig(
        vocab_size=32, context_length=8, num_layers=4, dim=16, num_heads=2, mlp_dim=32, moe=moe, tie_embeddings=tied
    )
    return GPTModule(config, optimizer=run.make_optimizer, decay="constant")


EXPERTS = MoEConfig(num_experts=4, top_k=2, expert_dim=8, router="sigmoid", balance_loss=0.1, balance_bias_rate=0.01)


class Waits(Net):
    """Waits as a user's code may."""

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        torch.tensor([1.0, 2.0], device=self.device)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if loss > 100 or float(batch["x"][batch["x"] > 0].sum()) < 0:
            raise ArithmeticError
        return loss


class Weighted(Net):
    """Weighs a microbatch by what it holds."""

    def microbatch_weight(self, microbatch: dict[str, Tensor]) -> Tensor:
        return (microbatch["y"] > -9).sum()


MODULES: dict[str, Callable[[Run], L.LightningModule]] = {
    "net": Net, "waits": Waits, "weighted": Weighted, "gpt": _gpt,
    "experts": partial(_gpt, moe=EXPERTS), "tied": partial(_gpt, tied=True),
}  # fmt: skip

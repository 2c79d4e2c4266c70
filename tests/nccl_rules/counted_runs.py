"""Scenarios that count the host's waits in Trainer runs, over a few mini-batches away from start and end."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning as L
import torch
from torch import Tensor

from lightning_asyncpp import PipelineMonitor
from lightning_asyncpp.core.wire import transport
from lightning_asyncpp.core.wire.transport import Arrival, Transport
from lightning_asyncpp.models import MoEConfig
from lightning_asyncpp.trainer.base import PipelineStrategy
from tests.helpers.modules import small_gpt
from tests.helpers.trainer import Net, Run, Watch, loader, make_trainer
from tests.nccl_rules.host_waits import DEVICE, HostWaits, Wait, put_on_device

FIRST, LAST = 5, 6  # range of the mini-batches that are counted; the first few of a run are checked more closely
MICROBATCHES = 4
EXPERTS = MoEConfig(num_experts=4, top_k=2, expert_dim=8, router="sigmoid", balance_loss=0.1, balance_bias_rate=0.01)


class Found(NamedTuple):
    """Counts of a rank: waits per mini-batch, mixed operands, which a GPU refuses, and reads of incomplete copies."""

    waits: dict[Wait, float]
    mixed: dict[Wait, int]
    early: dict[Wait, int]


class Waits(Net):
    """Module that waits for the device, as a user's code may."""

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        torch.tensor([1.0, 2.0], device=self.device)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if loss > 100 or float(batch["x"][batch["x"] > 0].sum()) < 0:
            raise ArithmeticError
        return loss


class Weighted(Net):
    """Module that weights a microbatch by its content."""

    def microbatch_weight(self, microbatch: dict[str, Tensor]) -> Tensor:
        return (microbatch["y"] > -9).sum()


def run_of(module: Callable[[Run], L.LightningModule], clips: bool = True, **more: Any) -> Run:
    """Return a run of a GPT or a net with the default staleness and, if ``clips``, gradient clipping."""
    of_gpt = isinstance(module, partial) or module is small_gpt
    monitor: Any = {"callbacks": ((PipelineMonitor, {"every_n_batches": 1}),), "dataset": "tokens"} if of_gpt else {}
    trainer = {"log_every_n_steps": 1000, "gradient_clip_val": 1.0 if clips else None} | more.pop("trainer", {})
    options = {"microbatches": MICROBATCHES} | more.pop("options", {})
    return Run(module, **{"strategy": "default"} | monitor | more, options=options, trainer=trainer)


def count(run: Run, saves: bool = False) -> Found:
    """Train, and return what was counted on this rank.

    Args:
        run: run to train.
        saves: whether whole checkpoints are saved between the mini-batches, and counted as well.
    """
    waits, batches = HostWaits(), run.trainer.get("accumulate_grad_batches", 1)

    def count_next(_: Watch, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        waits.counting = FIRST <= (index + 1) // batches <= LAST
        if saves and waits.counting:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / f"{index}.ckpt")

    with (
        waits.watching(),
        _received_on_device(),
        tempfile.TemporaryDirectory() as folder,
        patch.object(Watch, "on_train_batch_end", count_next),
        patch.object(PipelineStrategy, "root_device", DEVICE),
    ):
        L.seed_everything(5, verbose=False)
        module = run.module(run)
        trainer = make_trainer(run, default_root_dir=folder)
        trainer.fit(module, loader(run, count=(LAST + 2) * batches * run.batch_size))
    per_batch = {wait: number / (LAST - FIRST + 1) for wait, number in waits.waits.items()}
    return Found(per_batch, dict(waits.mixed), dict(waits.early))


@contextmanager
def _received_on_device() -> Iterator[None]:
    """Mark tensors received over sockets as on the device, and send without host copies: NCCL sends between GPUs."""
    activation, gradients = Transport.recv_forward, Transport.recv_backward

    def recv_forward(*args: Any) -> Arrival:
        arrival = activation(*args)
        put_on_device(arrival.tensors)
        return arrival

    def bytes_of(tensor: Tensor) -> memoryview:
        return transport.memory_of(tensor.detach().contiguous()).numpy().data

    with (
        patch.object(Transport, "recv_forward", recv_forward),
        patch.object(Transport, "recv_backward", lambda *args: put_on_device(gradients(*args))),
        patch.object(transport, "_bytes_of", bytes_of),
    ):
        yield

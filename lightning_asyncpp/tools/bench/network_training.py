"""A training as users write it, started by torchrun: ``... -m lightning_asyncpp.tools.bench.network_training FOLDER``.

``run.json`` in the folder says what to train; every rank writes ``rank-<rank>.json``: its stage, when each mini-batch
ended, and the last loss where it is known. Our strategies leave their trace in a folder beside it.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.tools.bench.names import ONE_F_ONE_B, STALENESS, SYNC
from lightning_asyncpp.tools.processes import end_with_parent
from lightning_asyncpp.trainer import AsyncPipelineStrategy, PipelineTrace, SyncPipelineStrategy

TRACE = "trace"


class Module(L.LightningModule):
    """Next-byte prediction with a GPT."""

    def __init__(self, run: dict[str, Any]) -> None:
        super().__init__()
        self.model = build_model(run)
        self.lr = run["lr"]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean loss of ``batch`` (rows, context + 1)."""
        loss = next_byte_loss(self.model(batch[:, :-1]), batch[:, 1:])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Clock(L.Callback):
    """Notes when each training batch ends."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the time."""
        self.marks.append(time.perf_counter())


def build_model(run: dict[str, Any]) -> GPT:
    """The same weights in every process and for every system."""
    torch.manual_seed(0)
    return GPT(GPTConfig(256, run["context"], run["layers"], run["dim"], num_heads=run["dim"] // 64))


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of ``logits`` (rows, context, 256) and ``targets`` (rows, context)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_batches(run: dict[str, Any], replica: int) -> list[Tensor]:
    """Consecutive bytes of Python's standard library as a replica's mini-batches (m * rows, context + 1), int64."""
    shape = run["mini_batches"] * run["replicas"], run["micro_batches"] * run["rows"], run["context"] + 1
    count = shape[0] * shape[1] * shape[2]
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(text) >= count:
            break
        text += path.read_bytes()
    text *= -(-count // len(text))
    return list(torch.frombuffer(bytearray(text[:count]), dtype=torch.uint8).long().view(shape))[
        replica :: run["replicas"]
    ]


def train_with_trainer(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One of our strategies."""
    clock = Clock()
    kind = SyncPipelineStrategy if run["system"] == SYNC else AsyncPipelineStrategy
    shape = {"micro_batches": run["micro_batches"], "lookahead": run["lookahead"]}
    strategy = kind(**shape, data_parallel_size=run["replicas"], **STALENESS.get(run["system"], {}))
    trainer = L.Trainer(
        accelerator="cpu", devices=run["stages"] * run["replicas"] // run["hosts"], num_nodes=run["hosts"],
        strategy=strategy, max_epochs=1, callbacks=[clock, PipelineTrace(str(folder / TRACE))], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    mesh = Mesh(run["stages"], run["replicas"], int(os.environ["RANK"]))
    trainer.fit(Module(run), DataLoader(read_batches(run, mesh.replica), batch_size=None))  # type: ignore[arg-type]
    loss = float(trainer.callback_metrics["train_loss"]) if trainer.global_rank == 0 else None
    return {"stage": mesh.stage, "marks": clock.marks, "loss": loss}


def train_with_torch(run: dict[str, Any]) -> dict[str, Any]:
    """torch's Schedule1F1B on the same cut of the same model; replicas reduce their gradients after the flush."""
    dist.init_process_group("gloo")
    num_stages, num_replicas = run["stages"], run["replicas"]
    replica, rank = divmod(dist.get_rank(), num_stages)
    pipelines = [dist.new_group([r * num_stages + s for s in range(num_stages)]) for r in range(num_replicas)]
    replicas = [dist.new_group([r * num_stages + s for r in range(num_replicas)]) for s in range(num_stages)]
    layers = own_layers(run, rank)
    stage = PipelineStage(layers, rank, num_stages, torch.device("cpu"), group=pipelines[replica])
    schedule = Schedule1F1B(stage, run["micro_batches"], loss_fn=next_byte_loss)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=run["lr"])
    marks: list[float] = []
    losses: list[Tensor] = []
    for batch in read_batches(run, replica):
        optimizer.zero_grad()
        losses = []
        arguments = (batch[:, :-1],) if rank == 0 else ()
        last: dict[str, Any] = {"target": batch[:, 1:], "losses": losses} if rank == num_stages - 1 else {}
        schedule.step(*arguments, return_outputs=False, **last)
        if num_replicas > 1:
            average_gradients(layers, replicas[rank], num_replicas)
        optimizer.step()
        marks.append(time.perf_counter())
    dist.barrier()
    dist.destroy_process_group()
    loss = float(torch.stack(losses).mean()) if losses else None
    return {"stage": rank, "marks": marks, "loss": loss}


def average_gradients(layers: nn.Module, group: dist.ProcessGroup, num_replicas: int) -> None:
    """All gradients in one message, as DistributedDataParallel's buckets would be, and not overlapped."""
    gradients = [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, mean in zip(gradients, (flat / num_replicas).split([g.numel() for g in gradients])):
        gradient.copy_(mean.view_as(gradient))


def own_layers(run: dict[str, Any], stage: int) -> nn.Sequential:
    """The layers of a stage, cut as our strategies cut."""
    model = build_model(run)
    units = pipeline_units(model)
    counts = choose_partition(model, stage, run["stages"], "auto").counts
    first = sum(counts[:stage])
    return nn.Sequential(*(unit.module for unit in units[first : first + counts[stage]]))


def main(argv: list[str]) -> None:
    """Train, and write what was measured."""
    end_with_parent()
    folder = Path(argv[0])
    run = json.loads((folder / "run.json").read_text())
    torch.set_num_threads(1)
    result = train_with_torch(run) if run["system"] == ONE_F_ONE_B else train_with_trainer(run, folder)
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])

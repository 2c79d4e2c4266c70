"""A two-stage training of a few updates, compared with the reference.

``python -m lightning_asyncpp.tools.doctor.trial FILE`` writes what it found as JSON; Lightning starts the second rank.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_asyncpp import AsyncPipelineStrategy
from lightning_asyncpp.core.schedule import StalenessRule
from lightning_asyncpp.reference import train_reference

UPDATES, MICROBATCHES, BATCH, WIDTH = 8, 4, 16, 64
PARTITION = [4, 3]


@dataclass(frozen=True)
class Found:
    """What a trial found."""

    route: str
    """Of tensors between the stages, in words."""
    seconds: float
    """Of the training."""
    difference: float
    """Largest difference of a weight from the reference, as a share of the largest change in its tensor."""
    backend: str
    """Of the process group."""

    @property
    def is_equal(self) -> bool:
        """Whether the pipeline trained what the reference trains: to the last bit on CPUs, to rounding on GPUs."""
        return self.difference <= (0.0 if self.backend == "gloo" else 1e-3)


class Small(L.LightningModule):
    """Layers whose weights stand in products and beside them, from one seed on every rank."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(
                nn.Linear(8, WIDTH), nn.Tanh(), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH),
                nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1),
            )  # fmt: skip

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return how far the outputs are from the inputs' sums."""
        return F.mse_loss(self.model(batch), batch.sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW; its eps keeps rounding from being taken for a gradient."""
        return torch.optim.AdamW(self.model.named_parameters(), lr=0.01, eps=1e-3)


def train() -> Found | None:
    """Train on what is here: a GPU for each stage, one for both, or the CPU; return what rank 0 found."""
    gpus = torch.cuda.device_count()
    shared = [torch.device("cuda", 0)] * 2 if gpus == 1 else None  # Lightning refuses more devices than there are
    strategy = AsyncPipelineStrategy(micro_batches=MICROBATCHES, partition=PARTITION, parallel_devices=shared)
    module, batches = Small(), _batches()
    trainer = L.Trainer(
        strategy=strategy, accelerator="cuda" if gpus else "cpu", devices=1 if gpus == 1 else 2,
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    began = time.perf_counter()
    trainer.fit(module, DataLoader(batches, batch_size=None, shuffle=False))  # type: ignore[arg-type]
    seconds = time.perf_counter() - began
    state = strategy.full_state_dict()
    if not trainer.is_global_zero:
        return None
    session = strategy.session
    rules = [schedule.stage_rule for schedule in session.running().schedules()]
    difference = largest_difference(state, expected(rules))
    transport = session.running().runner.transport
    route = "" if transport is None else f"tensors travel {transport.route}"
    return Found(route, seconds, difference, dist.get_backend())


def expected(rules: Sequence[StalenessRule]) -> Mapping[str, Tensor]:
    """The weights that the reference ends with, each stage by its rule."""
    module = Small()
    stages = [module.model[: PARTITION[0]], module.model[PARTITION[0] :]]
    train_reference(
        module.model, lambda batch: module.training_step(batch, 0), [[batch] for batch in _batches()],
        module.configure_optimizers(), micro_batches=MICROBATCHES,
        held=[(list(stage.parameters()), rule.held) for stage, rule in zip(stages, rules) if rule.held is not None],
        synchronous_start=rules[0].synchronous_start,
    )  # fmt: skip
    return module.state_dict()


def largest_difference(state: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Of all weights, as a share of the largest change in the tensor; infinite where names differ or it is NaN."""
    if state.keys() != reference.keys():
        return float("inf")
    start = Small().state_dict()
    shares = [
        float((state[name].cpu() - value).abs().max() / (value - start[name]).abs().max())
        for name, value in reference.items()
    ]
    return max(share if share == share else float("inf") for share in chain([0.0], shares))


def _batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, 8, generator=generator) for _ in range(UPDATES)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    if (found := train()) is not None:
        Path(sys.argv[1]).write_text(json.dumps(asdict(found)))

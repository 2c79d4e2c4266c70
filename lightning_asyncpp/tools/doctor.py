"""``asyncpp doctor``: report the installation on one screen, and test that a pipeline trains correctly.

The test trains two stages for a few updates in separate processes, and compares their weights with the reference.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
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
from lightning_asyncpp.dependencies import installed_versions
from lightning_asyncpp.reference import train_reference
from lightning_asyncpp.tools.parsers import cores, doctor_parser

UPDATES, MICROBATCHES, BATCH, WIDTH = 8, 4, 16, 64
PARTITION = [4, 3]


@dataclass(frozen=True)
class Found:
    """Result of the test."""

    route: str
    """Route of tensors between the stages, in words."""
    seconds: float
    """Duration of the training."""
    difference: float
    """Largest difference of a weight from the reference, divided by the largest change in the same tensor."""
    backend: str
    """Backend of the process group."""

    @property
    def is_equal(self) -> bool:
        """Whether results equal the reference, which runs on the CPU: bit for bit there, up to rounding on GPUs."""
        return self.difference <= (1e-3 if torch.cuda.device_count() else 0.0)


class Small(L.LightningModule):
    """Small module of linear layers and norms, with the same weights on every rank."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(
                nn.Linear(8, WIDTH), nn.Tanh(), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH),
                nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1),
            )  # fmt: skip

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean squared error between the outputs and the inputs' sums."""
        return F.mse_loss(self.model(batch), batch.sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW; its large eps makes steps insensitive to rounding errors in small gradients."""
        return torch.optim.AdamW(self.model.named_parameters(), lr=0.01, eps=1e-3)


def train() -> Found | None:
    """Train on two GPUs, on a single one for both stages, or on the CPU; return the result on rank 0."""
    gpus = torch.cuda.device_count()
    shared = [torch.device("cuda", 0)] * 2 if gpus == 1 else None  # Lightning refuses more devices than there are
    strategy = AsyncPipelineStrategy(microbatches=MICROBATCHES, partition=PARTITION, parallel_devices=shared)
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
    route = "" if transport is None else transport.route
    return Found(f"tensors travel {route}", seconds, difference, dist.get_backend())


def expected(rules: Sequence[StalenessRule]) -> Mapping[str, Tensor]:
    """Return the final weights of the reference, which trains each stage by its staleness rule."""
    module = Small()
    stages = [module.model[: PARTITION[0]], module.model[PARTITION[0] :]]
    numbers = [rule.num_stale for rule in rules]
    train_reference(
        module.model, lambda batch: module.training_step(batch, 0), [[batch] for batch in _batches()],
        module.configure_optimizers(), microbatches=MICROBATCHES,
        stale_counts=[(list(stage.parameters()), h) for stage, h in zip(stages, numbers) if h is not None],
        synchronous_start=rules[0].synchronous_start,
    )  # fmt: skip
    return module.state_dict()


def largest_difference(state: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Return :attr:`Found.difference`; infinity if a weight is NaN or if the names of weights differ."""
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


PACKAGES = ("lightning-asyncpp", "torch", "lightning", "torchmetrics", "litdata", "triton")
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_", "PYTORCH_", "OMP_")
"""Prefixes of the environment variables in the report."""
_LOG_LINES = 25
_TRIAL = "lightning_asyncpp.tools.doctor"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the report; exit with code 1 if the training fails or differs from the reference."""
    limit = doctor_parser().parse_args(argv).timeout
    for name, value in [*_versions(), *_devices(), *_environment()]:
        _say(name, value)
    print(f"two stages train for a few updates, for {limit} s at most", file=sys.stderr)
    found, log = run_trial(limit)
    if found is None:
        _say("training", f"FAILED, or did not end within {limit} s. The last lines of its log:\n")
        print("\n".join(log.splitlines()[-_LOG_LINES:]))
        raise SystemExit(1)
    _say("training", f"2 stages, {UPDATES} updates in {found.seconds:.1f} s; {found.route}, over {found.backend}")
    share = f"{found.difference:.1g} of the largest change"
    if not found.is_equal:
        _say("result", f"WRONG: differs from the reference by {share}. Do not train here, and report this output")
        raise SystemExit(1)
    _say("result", f"equal to the reference {f'up to rounding, {share}' if found.difference else 'to the last bit'}")


def run_trial(limit: float) -> tuple[Found | None, str]:
    """Run the test in separate processes, since it may hang; return its result (None if it failed) and its log."""
    with tempfile.TemporaryDirectory(prefix="asyncpp-doctor-") as folder:
        result, log = Path(folder) / "found.json", Path(folder) / "log"
        command = [sys.executable, "-X", "faulthandler", "-m", _TRIAL, str(result)]
        with log.open("wb") as output:
            trial = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = trial.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
                _signal(trial, signal.SIGABRT)  # rank 0 writes the stacks of its threads
            finally:
                _signal(trial, signal.SIGKILL)
                trial.wait()
        found = Found(**json.loads(result.read_text())) if code == 0 else None
        return found, log.read_text(errors="replace")


def _signal(trial: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(trial.pid, number)
        if number is signal.SIGABRT:
            trial.wait(5)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass


def _versions() -> Iterator[tuple[str, str]]:
    yield "system", f"{platform.platform()}, Python {platform.python_version()}, {cores()} cores"
    yield "packages", ", ".join(f"{name} {version}" for name, version in installed_versions(PACKAGES).items())
    cuda, hip = torch.version.cuda, torch.version.hip
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and torch.distributed.is_nccl_available() else ()
    driver = Path("/proc/driver/nvidia/version")
    yield "CUDA", ", ".join([
        f"built for {f'CUDA {cuda}' if cuda else f'ROCm {hip}' if hip else 'CPUs'}",
        f"NCCL {'.'.join(map(str, nccl[:3]))}" if nccl else "no NCCL",
        next((line for line in driver.read_text().splitlines() if line), "") if driver.exists() else "no NVIDIA driver",
    ])  # fmt: skip


def _devices() -> Iterator[tuple[str, str]]:
    count = torch.cuda.device_count()
    if not count:
        yield "GPUs", "none: two processes train on the CPU"
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        peers = [other for other in range(count) if other != index and torch.cuda.can_device_access_peer(index, other)]
        reaches = f"; can access the memory of GPU {', '.join(map(str, peers)) or 'none'}" if count > 1 else ""
        yield f"GPU {index}", f"{properties.name}, {free:.0f} of {total:.0f} GiB free{reaches}"


def _environment() -> Iterator[tuple[str, str]]:
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)]
    yield "variables", " ".join(found) or f"none that begin with {', '.join(PREFIXES)}"


def _say(name: str, value: str) -> None:
    print(f"{name:<10} {value}", flush=True)


if __name__ == "__main__":  # the test, on each of its ranks
    torch.set_num_threads(1)
    if (found := train()) is not None:
        Path(sys.argv[1]).write_text(json.dumps(asdict(found)))

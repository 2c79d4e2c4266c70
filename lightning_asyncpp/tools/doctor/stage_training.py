"""What a stage's training is fed, and what watches it; and the same training by a plain loop.

The recipes of :mod:`.stage_recipe` name the former. ``python -m lightning_asyncpp.tools.doctor.stage_training RECIPE``
is the plain loop: no Trainer, no strategy, one version of the weights: what a strategy is measured against.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.optim import MuonAdamW

_SYNCHRONIZING = "called a synchronizing CUDA operation"


class RandomTokens(L.LightningDataModule):
    """Random tokens, (batch_size, context_length + 1) each batch.

    Args:
        batch_size: sequences of a mini-batch.
        context_length: targets of a sequence.
        vocab_size: number of different tokens.
        batches: how many there are.
    """

    def __init__(self, batch_size: int, context_length: int, vocab_size: int, batches: int) -> None:
        super().__init__()
        self.shape = (batch_size, context_length + 1)
        self.vocab_size, self.batches = vocab_size, batches

    def example_batch(self) -> Tensor:
        """What a batch looks like, for the plan."""
        return torch.zeros(self.shape, dtype=torch.int64)

    def train_dataloader(self) -> DataLoader:
        """Batches as they are: loading them shall cost nothing."""
        generator = torch.Generator().manual_seed(3)
        data = [torch.randint(self.vocab_size, self.shape, generator=generator) for _ in range(self.batches)]
        return DataLoader(data, batch_size=None, pin_memory=torch.cuda.is_available())  # type: ignore[arg-type]


class StageClock(L.Callback):
    """Times mini-batches, counts what makes the host wait for a GPU, and takes the peak of memory.

    Args:
        path: of the JSON file for what was found.
        warm_up: mini-batches before.
        measured: mini-batches that are timed.
        watched: mini-batches after these, in which waits of the host are counted.
    """

    def __init__(self, path: str, warm_up: int, measured: int, watched: int) -> None:
        self.path = Path(path)
        self.starts, self.ends, self.watched = warm_up - 1, warm_up + measured - 1, watched
        self.seconds = 0.0
        self.waits: Counter[str] = Counter()
        self._resident = 0
        self._catcher: Any = None
        self._caught: Any = None

    def on_fit_start(self, *_: Any) -> None:
        """Look how large the process is without the model's work."""
        self._resident = peak_resident()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Look at the clock, where it is time."""
        if batch_idx == self.starts:
            self.seconds = -now()
        elif batch_idx == self.ends:
            self.seconds += now()
            self._start_watching()
        elif batch_idx == self.ends + self.watched:
            self._stop_watching()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write what was found."""
        self._stop_watching()
        found: dict[str, Any] = {"seconds": self.seconds / (self.ends - self.starts), **peaks(self._resident)}
        found |= {"waits": sum(self.waits.values()) / max(1, self.watched), "places": dict(self.waits.most_common(20))}
        found["flops_per_token"] = pl_module.flops_per_token
        self.path.write_text(json.dumps(found), encoding="utf-8")

    def _start_watching(self) -> None:
        if not torch.cuda.is_initialized() or not self.watched:
            return
        self._catcher = warnings.catch_warnings(record=True)
        self._caught = self._catcher.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def _stop_watching(self) -> None:
        if self._catcher is None:
            return
        torch.cuda.set_sync_debug_mode("default")
        self._catcher.__exit__(None, None, None)
        self._catcher = None
        for warning in self._caught:
            if _SYNCHRONIZING in str(warning.message):
                self.waits[f"{'/'.join(Path(warning.filename).parts[-3:])}:{warning.lineno}"] += 1


def now() -> float:
    """Seconds, when the device has done all that it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_resident() -> int:
    """Largest memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peaks(resident_before: int) -> dict[str, int]:
    """Peak of memory in bytes: of tensors and of what torch holds on a GPU, else how much the process has grown."""
    if not torch.cuda.is_initialized():
        return {"grown": peak_resident() - resident_before}
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def train(recipe: dict[str, Any]) -> dict[str, Any]:
    """Train, and say how long a mini-batch took and how much memory, as :class:`.StageClock` does."""
    trainer, model_arguments = recipe["trainer"], recipe["model"]["init_args"]
    clock = trainer["callbacks"][0]["init_args"]
    device = torch.device("cuda", 0) if trainer["accelerator"] == "gpu" else torch.device("cpu")
    micro_batches = trainer["strategy"]["init_args"]["micro_batches"]
    resident = peak_resident()
    torch.manual_seed(1)
    config = GPTConfig(**model_arguments["config"])
    model = GPT(config, compile_blocks=model_arguments["compile_blocks"]).to(device)
    optimizer = MuonAdamW(model.named_parameters(), **model_arguments["optimizer"]["init_args"])
    mixed = trainer["precision"] == "bf16-mixed"
    seconds = 0.0
    for index, batch in enumerate(RandomTokens(**recipe["data"]["init_args"]).train_dataloader(), 1):
        if index > clock["warm_up"] + clock["measured"]:
            break
        for tokens in batch.to(device, non_blocking=True).tensor_split(micro_batches):
            with torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext():
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            (loss / micro_batches).backward()
        clip_grad_norm_(model.parameters(), trainer["gradient_clip_val"])
        optimizer.step()
        optimizer.zero_grad()
        if index == clock["warm_up"]:
            seconds = -now()
    seconds += now()
    return {
        "seconds": seconds / clock["measured"], **peaks(resident), "flops_per_token": config.flops_per_token(),
    }  # fmt: skip


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    result = Path(given["trainer"]["callbacks"][0]["init_args"]["path"])
    result.write_text(json.dumps(train(given)), encoding="utf-8")

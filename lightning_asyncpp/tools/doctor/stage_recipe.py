"""Recipes of one stage of a GPT: what is trained, planned, and trained once more by a plain loop."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_asyncpp.tools.doctor.machine import Machine
from lightning_asyncpp.tools.plan.devices import DEVICES

_TRAINING = "lightning_asyncpp.tools.doctor.stage_training"
LEARNING_RATE = 1e-3
_PEAKS = {"H200": "h200", "H100": "h100", "B200": "b200", "A100": "a100", "L40S": "l40s", "RTX 4090": "rtx4090"}
_KNOWN = re.compile(rf"\b({'|'.join(_PEAKS)})\b")
_OTHER_PEAKS = re.compile(r"\b(NVL|MIG|Laptop|H100.* PCIe|4090 D)\b")
"""Variants with other figures."""


@dataclass(frozen=True)
class Row:
    """One way to run the stage.

    Attributes:
        name: of its files.
        title: in the report.
        precision: of the Trainer.
        compiled: whether blocks are compiled.
        weight_dtype: of the weight versions.
        plain: whether a plain loop runs it, without Trainer and strategy.
        is_quick: whether ``--quick`` runs it, too.
    """

    name: str
    title: str
    precision: str
    compiled: bool = False
    weight_dtype: str | None = None
    plain: bool = False
    is_quick: bool = True


@dataclass(frozen=True)
class Size:
    """How large the stage and its mini-batches are, and how many of these are run.

    Attributes:
        config: of the GPT.
        sequences: of a micro-batch.
        micro_batches: of a mini-batch.
        warm_up, measured, watched: mini-batches, as for :class:`.StageClock`.
    """

    config: dict[str, Any]
    sequences: int
    micro_batches: int
    warm_up: int
    measured: int
    watched: int

    @property
    def tokens(self) -> int:
        """Targets of a mini-batch."""
        return self.sequences * self.micro_batches * int(self.config["context_length"])


_ON_GPU = Size(
    # A quarter of SmolLM-360M, with a smaller vocabulary.
    {"vocab_size": 8192, "context_length": 2048, "num_layers": 9, "dim": 960, "num_heads": 15, "num_kv_heads": 5,
     "mlp_dim": 2560},
    4, 8, 5, 8, 3,
)  # fmt: skip
_ON_SMALL_GPU = Size(_ON_GPU.config, 1, 4, 3, 4, 2)
_SMALL_GIB = 12.0
"""With as much free the larger size fits, which takes some 6 GiB."""
_ON_CPU = Size({"vocab_size": 512, "context_length": 64, "num_layers": 2, "dim": 128, "num_heads": 4}, 2, 2, 2, 4, 0)


def size_of(machine: Machine) -> Size:
    """What fits a machine."""
    if not machine.gpus:
        return _ON_CPU
    gpu = machine.gpus[0]
    return _ON_SMALL_GPU if gpu.free_gib < _SMALL_GIB or gpu.capability < (8, 0) else _ON_GPU


def rows_of(machine: Machine) -> list[Row]:
    """What is run on a machine, the most telling first; the first is the one that is planned, too."""
    if not machine.gpus:
        return [
            Row("eager", "eager, float32", "32-true"),
            Row("bf16", "eager, bf16-mixed", "bf16-mixed"),
            Row("plain", "a plain loop, eager, float32", "32-true", plain=True, is_quick=False),
            Row("compiled", "compiled, float32", "32-true", compiled=True, is_quick=False),
        ]
    return [
        Row("eager", "eager, bf16-mixed", "bf16-mixed"),
        Row("plain", "a plain loop, eager, bf16", "bf16-mixed", plain=True),
        Row("compiled", "compiled, bf16-mixed", "bf16-mixed", True),
        Row("plain-compiled", "a plain loop, compiled, bf16", "bf16-mixed", True, plain=True, is_quick=False),
        Row("bf16", "compiled, bf16-mixed, weight_dtype bf16", "bf16-mixed", True, "bf16", is_quick=False),
    ]


def recipe_of(row: Row, size: Size, is_gpu: bool, result: Path) -> dict[str, Any]:
    """A recipe of ``asyncpp fit``.

    Args:
        row: how it is run.
        size: how large it is.
        is_gpu: whether on a GPU.
        result: the file that its clock writes.
    """
    steps = size.warm_up + size.measured + size.watched
    # As the first of several stages works: without others the default would have no delay.
    strategy: dict[str, Any] = {"micro_batches": size.micro_batches, "staleness": "uniform"}
    if row.weight_dtype is not None:
        strategy["weight_dtype"] = row.weight_dtype
    clock = {"path": str(result), "warm_up": size.warm_up, "measured": size.measured, "watched": size.watched}
    tokens = {"batch_size": size.sequences * size.micro_batches, "batches": steps}
    tokens |= {name: size.config[name] for name in ("context_length", "vocab_size")}
    return {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "gpu" if is_gpu else "cpu", "devices": 1, "max_steps": steps, "precision": row.precision,
            "strategy": {"class_path": "lightning_asyncpp.AsyncPipelineStrategy", "init_args": strategy},
            "gradient_clip_val": 1.0, "default_root_dir": str(result.parent), "logger": False,
            "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
            "callbacks": [{"class_path": f"{_TRAINING}.StageClock", "init_args": clock}],
            # In a job of Slurm, too, it is one process that nobody else has to start.
            "plugins": [{"class_path": "lightning.fabric.plugins.environments.LightningEnvironment"}],
        },
        "model": {
            "class_path": "lightning_asyncpp.GPTModule",
            "init_args": {
                "config": size.config, "decay": "constant", "compile_blocks": row.compiled,
                "optimizer": {
                    "class_path": "lightning_asyncpp.optim.MuonAdamW", "init_args": {"lr": LEARNING_RATE},
                },
            },
        },
        "data": {"class_path": f"{_TRAINING}.RandomTokens", "init_args": tokens},
    }  # fmt: skip


def peak_tflops(name: str) -> float | None:
    """Peak of a GPU in dense products in bf16, in TFLOP/s, by its name; ``None`` if it is not known."""
    known = _KNOWN.search(name)
    return DEVICES[_PEAKS[known[1]]].tflops if known and not _OTHER_PEAKS.search(name) else None

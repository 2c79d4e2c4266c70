"""Trainings whose memory is planned and measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
ADAMW = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}}
MUON = {"class_path": "lightning_asyncpp.optim.MuonAdamW", "init_args": {"newton_schulz_dtype": "float32"}}


def feedback(base: dict[str, Any]) -> dict[str, Any]:
    return {"class_path": "lightning_asyncpp.optim.ErrorFeedback", "init_args": {"base": base}}


@dataclass(frozen=True)
class Case:
    """Training of a GPT with an optimizer in a pipeline."""

    stages: int
    config: dict[str, Any]
    optimizer: dict[str, Any]
    batch_size: int = 8
    strategy: dict[str, Any] = field(default_factory=dict)
    synchronous: bool = False
    precision: str = "32-true"
    model: dict[str, Any] = field(default_factory=dict)
    steps: int = 4

    @property
    def devices(self) -> int:
        return self.stages * int(self.strategy.get("data_parallel_size", 1))

    def recipe(self) -> dict[str, Any]:
        name = "SyncPipelineStrategy" if self.synchronous else "AsyncPipelineStrategy"
        data = {"batch_size": self.batch_size, "batches": self.steps * 2}
        data |= {key: self.config[key] for key in ("context_length", "vocab_size")}
        return {
            "seed_everything": 1,
            "trainer": {
                "accelerator": "cpu", "devices": self.devices, "max_steps": self.steps, "precision": self.precision,
                "strategy": {"class_path": f"lightning_asyncpp.{name}", "init_args": self.strategy},
                "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
                "enable_model_summary": False,
            },
            "model": {
                "class_path": "lightning_asyncpp.GPTModule",
                "init_args": {"config": self.config, "optimizer": self.optimizer, "decay": "constant", **self.model},
            },
            "data": {"class_path": "tests.tools.plan.plain.Tokens", "init_args": data},
        }  # fmt: skip


GPT: dict[str, Any] = {"vocab_size": 512, "context_length": 128, "num_layers": 6, "dim": 256, "num_heads": 4}
WIDE = {**GPT, "dim": 384}  # larger weights, compared with the activations

CASES = {
    "muon-feedback": Case(2, {**GPT, "dim": 384, "num_kv_heads": 2}, feedback(MUON), 8, {"microbatches": 2}),
    "bf16-versions": Case(
        2, {**GPT, "dim": 384}, feedback(ADAMW), 8, {"microbatches": 2, "weight_dtype": "bf16"}, precision="bf16-mixed"
    ),
    "checkpointed": Case(
        2, {**GPT, "num_layers": 10}, ADAMW, 32, {"microbatches": 4}, model={"activation_checkpointing": "block"}
    ),
    "synchronous": Case(3, GPT, feedback(MUON), 40, {"microbatches": 5}, synchronous=True, steps=3),
    "least-replicas": Case(
        2, WIDE, feedback(ADAMW), 4, {"microbatches": 4, "staleness": "least", "data_parallel_size": 2}
    ),
    "experts": Case(
        2,
        {**GPT, "num_layers": 4, "mlp_dim": 512, "moe": {"num_experts": 8, "top_k": 2, "expert_dim": 256}},
        feedback(MUON),
        8,
        {"microbatches": 4},
    ),
}

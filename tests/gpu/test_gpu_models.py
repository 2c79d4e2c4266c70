"""Language models train in stages on one GPU: mixed precision, compiled blocks, narrow weight versions, experts.

Each trains with the Trainer, started as a user starts it, and is compared with the same delay in one process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.scripts import run

SCRIPT = """
import json, sys
import lightning as L
import torch
from lightning_asyncpp import AsyncPipelineStrategy, DelayedGradientStrategy, GPTModule
from lightning_asyncpp.models import GPTConfig, MoEConfig
from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW

given = json.loads(sys.argv[1])
torch.set_float32_matmul_precision(given.get("matmul", "highest"))
L.seed_everything(1, verbose=False)
moe = MoEConfig(**given["moe"]) if "moe" in given else None
config = GPTConfig(
    vocab_size=256, context_length=64, num_layers=4, dim=128, num_heads=4, num_kv_heads=2, moe=moe,
    tie_embeddings=given.get("tied", False),
)
optimizer = lambda p: ErrorFeedback(p, base=lambda q: MuonAdamW(q, lr=0.005, newton_schulz_dtype="float32"))
module = GPTModule(config, optimizer, decay="constant", compile_blocks=given.get("compile", False))
generator = torch.Generator().manual_seed(0)
start = torch.randint(256, (25, 16, 1), generator=generator)
data = list((start + 7 * torch.arange(65)) % 256)  # (16, 65) each: the next token is to be learned
if given["alone"]:
    strategy = DelayedGradientStrategy("least", stages=2, microbatches=4)
else:
    strategy = AsyncPipelineStrategy(
        microbatches=4, parallel_devices=[torch.device("cuda:0")] * 2, weight_dtype=given.get("weight_dtype"),
    )
losses = []
class Watch(L.Callback):
    def on_validation_end(self, trainer, module):
        losses.append(float(trainer.callback_metrics["val_loss"]))
trainer = L.Trainer(
    strategy=strategy, devices=1, accelerator="cuda", max_epochs=1, logger=False, enable_progress_bar=False,
    precision=given["precision"], enable_checkpointing=False, gradient_clip_val=1.0, val_check_interval=8,
    num_sanity_val_steps=0, callbacks=[Watch()],
)
loader = torch.utils.data.DataLoader(data, batch_size=None)
trainer.fit(module, loader, torch.utils.data.DataLoader(data[:2], batch_size=None))
if trainer.is_global_zero:
    print("RESULT" + json.dumps(losses))
"""
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "expert_dim": 64, "num_shared_experts": 1, "router": "sigmoid", "balance_bias_rate": 0.01,
    "num_dense_layers": 1,
}  # fmt: skip
MIXED: dict[str, Any] = {"precision": "bf16-mixed"}
CASES: dict[str, dict[str, Any]] = {
    "float32": {"precision": "32-true"},
    "mixed": MIXED,
    "compiled": {**MIXED, "compile": True, "tied": True},
    "narrow-versions": {**MIXED, "weight_dtype": "bf16"},
    "experts": {**MIXED, "moe": EXPERTS},
    "compiled-experts": {**MIXED, "moe": EXPERTS, "compile": True},
}
TOLERANCES = {"float32": 1e-4, "narrow-versions": 0.05}


@pytest.mark.parametrize("name", CASES)
def test_two_stages_on_one_gpu_lose_what_one_process_does(name: str, tmp_path: Path) -> None:
    losses, alone = (run(SCRIPT, tmp_path, json.dumps({**CASES[name], "alone": alone}))[0] for alone in (False, True))
    assert len(losses) == len(alone) == 3
    assert losses[-1] < 0.8 * losses[0], losses
    assert losses == pytest.approx(alone, rel=TOLERANCES.get(name, 0.02))

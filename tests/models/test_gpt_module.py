from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_asyncpp.models import GPTConfig
from lightning_asyncpp.trainer.callbacks.pipeline_monitor import PipelineMonitor
from lightning_asyncpp.trainer.gpt_module import GPTModule, learning_rate_factor

TINY = GPTConfig(vocab_size=32, context_length=16, num_layers=1, dim=16, num_heads=2, mlp_dim=32)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def batches(count: int = 6) -> DataLoader:
    tokens = torch.randint(0, 32, (4 * count, 17), generator=torch.Generator().manual_seed(1))
    return DataLoader(tokens, batch_size=4)  # type: ignore[arg-type]


def trainer(folder: Path, **arguments: Any) -> L.Trainer:
    return L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **arguments,
    )


def test_weight_and_loss_leave_padding_out() -> None:
    module = GPTModule(TINY)
    module.configure_model()
    tokens = next(iter(batches()))
    padded = tokens.clone()
    padded[2, 9:] = -100
    padded[3, 1:] = -100
    assert module.microbatch_weight(tokens) == 64
    assert module.microbatch_weight(padded) == 16 + 16 + 8 + 0
    per_sequence = module.predict_step(padded, 0)
    torch.testing.assert_close(per_sequence[:2], module.predict_step(tokens, 0)[:2])
    assert per_sequence[3] == 0
    mean = module._mean_loss(padded)
    torch.testing.assert_close(mean, (per_sequence * torch.tensor([16, 16, 8, 0])).sum() / 40)
    nothing = module._mean_loss(torch.full((2, 17), -100))
    nothing.backward()
    assert nothing == 0
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in module.parameters())


def test_learning_rate(tmp_path: Path) -> None:
    seen: list[float] = []

    class Watch(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen.append(optimizer.param_groups[0]["lr"])

    module = GPTModule(TINY, optimizer=adam, warmup_steps=2, min_lr_ratio=0.1)
    trainer(tmp_path, max_epochs=1, callbacks=[Watch()], enable_checkpointing=False).fit(module, batches(6))
    cosine = [0.01 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 4))) for step in range(4)]
    assert seen == pytest.approx([0.005, 0.01, *cosine])
    constant = learning_rate_factor(GPTModule(TINY, decay="constant", warmup_steps=4))
    assert [constant(step) for step in (0, 3, 4, 10**6)] == [0.25, 1.0, 1.0, 1.0]
    wsd = learning_rate_factor(GPTModule(TINY, decay="wsd", warmup_steps=4, min_lr_ratio=0.2, total_steps=24))
    assert [wsd(step) for step in (3, 4, 20, 21, 22, 24, 30)] == pytest.approx([1.0, 1.0, 1.0, 0.8, 0.6, 0.2, 0.2])


def test_default_optimizer_trains_and_a_checkpoint_is_read_without_code(tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    module = GPTModule(TINY, warmup_steps=1)
    loader = batches(2)
    first = float(trainer(tmp_path, enable_checkpointing=False).validate(module, loader, verbose=False)[0]["val_loss"])
    run = trainer(tmp_path, max_epochs=4, callbacks=[PipelineMonitor(window=3, every_n_batches=1)])
    run.fit(module, loader, loader)
    assert float(run.callback_metrics["val_loss"]) < first - 0.005
    assert float(run.callback_metrics["tokens_per_second"]) > 0
    path = run.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    torch.load(path, weights_only=True)
    loaded = GPTModule.load_from_checkpoint(path, weights_only=True)
    assert loaded.config == TINY
    assert loaded.warmup_steps == 1

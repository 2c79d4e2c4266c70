"""GPTModule has the right loss, learning rates and checkpoints, and with experts the right updates and metrics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_asyncpp.auxiliary import collecting
from lightning_asyncpp.models import GPTConfig, MoEConfig
from lightning_asyncpp.trainer.gpt_module import GPTModule, learning_rate_factor

SHAPE: dict[str, Any] = {"vocab_size": 32, "context_length": 16, "dim": 16, "num_heads": 2, "mlp_dim": 32}
TINY = GPTConfig(**SHAPE, num_layers=1)
MOE = MoEConfig(num_experts=4, expert_dim=8, router="sigmoid", balance_loss=0.5, balance_bias_rate=0.01)


def batches(count: int = 6) -> DataLoader:
    tokens = torch.randint(0, 32, (4 * count, 17), generator=torch.Generator().manual_seed(1))
    return DataLoader(tokens, batch_size=4)  # type: ignore[arg-type]


def trainer(folder: Path, **arguments: Any) -> L.Trainer:
    return L.Trainer(
        **{"max_epochs": 1, "log_every_n_steps": 1, **arguments}, default_root_dir=folder, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, logger=False,
    )  # fmt: skip


class Watch(L.Callback):
    """Callback that records the learning rate of each update, and the logged metrics after each batch."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.metrics: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.logged_metrics.items()})


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
    watch = Watch()
    module = GPTModule(TINY, optimizer=lambda p: torch.optim.Adam(p, lr=0.01), warmup_steps=2, min_lr_ratio=0.1)
    trainer(tmp_path, callbacks=[watch], enable_checkpointing=False, max_steps=99).fit(module, batches(6))
    cosine = [0.01 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 4))) for step in range(4)]
    assert watch.rates == pytest.approx([0.005, 0.01, *cosine])
    constant = learning_rate_factor(GPTModule(TINY, decay="constant", warmup_steps=4))
    with pytest.raises(ValueError, match="decay='linear': must be 'cosine' or 'wsd' or 'constant'"):
        GPTModule(TINY, decay="linear")  # type: ignore[arg-type]
    assert [constant(step) for step in (0, 3, 4, 10**6)] == [0.25, 1.0, 1.0, 1.0]
    wsd = learning_rate_factor(GPTModule(TINY, decay="wsd", warmup_steps=4, min_lr_ratio=0.2, total_steps=24))
    assert [wsd(step) for step in (3, 4, 20, 21, 22, 24, 30)] == pytest.approx([1.0, 1.0, 1.0, 0.8, 0.6, 0.2, 0.2])


def test_default_optimizer_trains_and_a_checkpoint_is_read_without_code(tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    module = GPTModule(TINY, warmup_steps=1)
    loader = batches(2)
    first = float(trainer(tmp_path, enable_checkpointing=False).validate(module, loader, verbose=False)[0]["val_loss"])
    run = trainer(tmp_path, max_epochs=4)
    run.fit(module, loader, loader)
    assert float(run.callback_metrics["val_loss"]) < first - 0.005
    path = run.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    torch.load(path, weights_only=True)
    loaded = GPTModule.load_from_checkpoint(path, weights_only=True)
    assert loaded.config == TINY
    assert loaded.warmup_steps == 1


# -- with experts, under a strategy of Lightning that has no special support for them ---------------------------------


def sparse() -> GPTModule:
    L.seed_everything(0, verbose=False)
    config = GPTConfig(**SHAPE, num_layers=2, init_std=0.2, moe=MOE)
    return GPTModule(config, decay="constant", optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))


def by_hand(groups: list[list[Tensor]]) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Train on groups of batches, with one update per group; return the model and the metrics of each update."""
    module = sparse()
    module.configure_model()
    model: Any = module.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updates = []
    for group in groups:
        counts: dict[Any, Tensor] = {}
        for batch in group:
            with collecting() as collected:
                cross_entropy = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            ((cross_entropy + collected.total_loss()) / len(group)).backward()
            for layer, counted in collected.statistics.items():
                counts[layer] = counts.get(layer, 0) + counted
        optimizer.step()
        optimizer.zero_grad()
        for layer, counted in counts.items():
            layer.update_from_statistics(counted)
        metrics = [layer.compute_metrics(counted) for layer, counted in counts.items()]
        updates.append({
            "train_loss": cross_entropy.item(),
            "moe_load_max": max(m["moe_load_max"] for m in metrics),
            "moe_entropy": sum(m["moe_entropy"] for m in metrics) / 2,
        })  # fmt: skip
    return model, updates


@pytest.mark.parametrize("accumulate", [1, 2])
def test_experts_in_one_process(tmp_path: Path, accumulate: int) -> None:
    module, loader, watch = sparse(), batches(4), Watch()
    trainer(tmp_path, callbacks=[watch], accumulate_grad_batches=accumulate).fit(module, loader)
    all_batches = list(loader)
    model, updates = by_hand([all_batches[i : i + accumulate] for i in range(0, 4, accumulate)])
    found: Any = module.model
    for (name, tensor), expected in zip(found.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(tensor, expected), name
    for update, metrics in zip(updates, watch.metrics[accumulate - 1 :: accumulate], strict=True):
        assert {name: metrics[name] for name in update} == pytest.approx(update, rel=1e-6)
    assert 0 < found.blocks[0].mlp.router.balance_bias.abs().max() <= 0.01 * 4 / accumulate + 1e-6

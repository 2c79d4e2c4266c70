"""A GPT with experts under strategies that know nothing of them: what is differentiated, learnt and logged."""

from __future__ import annotations

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
from lightning_asyncpp.trainer.gpt_module import GPTModule

MOE = MoEConfig(
    num_experts=4, top_k=2, expert_dim=8, router="sigmoid", balance_loss=0.5, balance_bias_rate=0.01
)  # fmt: skip
TINY = GPTConfig(vocab_size=32, context_length=16, num_layers=2, dim=16, num_heads=2, mlp_dim=32, init_std=0.2, moe=MOE)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters], lr=0.1)


def batches(count: int = 6, size: int = 4) -> DataLoader:
    tokens = torch.randint(0, 32, (size * count, 17), generator=torch.Generator().manual_seed(1))
    return DataLoader(tokens, batch_size=size)  # type: ignore[arg-type]


class Seen(L.Callback):
    """What was logged at each batch, and the routers' biases after it."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.biases: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.logged_metrics.items()})
        self.biases.append(torch.stack([block.mlp.router.balance_bias.clone() for block in pl_module.model.blocks]))


def fit(folder: Path, module: GPTModule, loader: DataLoader, **options: Any) -> tuple[L.Trainer, Seen]:
    seen = Seen()
    trainer = L.Trainer(
        **{"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 1, **options}, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, logger=False, callbacks=[seen],
    )  # fmt: skip
    trainer.fit(module, loader)
    return trainer, seen


def made(optimizer: Any = sgd, **options: Any) -> GPTModule:
    L.seed_everything(0, verbose=False)
    return GPTModule(TINY, optimizer=optimizer, decay="constant", **options)


def by_hand(groups: list[list[Tensor]]) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Train on groups of batches, an update for each: the model, and what each update was made of."""
    module = made()
    module.configure_model()
    model = module.model
    assert model is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updates = []
    for group in groups:
        counts: dict[Any, Tensor] = {}
        for batch in group:
            with collecting() as said:
                cross_entropy = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            ((cross_entropy + said.total_loss()) / len(group)).backward()
            for layer, counted in said.statistics.items():
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
            "tokens": float(next(iter(counts.values()))[4]),
        })  # fmt: skip
    return model, updates


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_process(tmp_path: Path, accumulate: int) -> None:
    module, loader = made(), batches(4)
    _, seen = fit(tmp_path, module, loader, accumulate_grad_batches=accumulate)
    all_batches = list(loader)
    groups = [all_batches[i : i + accumulate] for i in range(0, 4, accumulate)]
    model, updates = by_hand(groups)
    assert module.model is not None
    for (name, tensor), expected in zip(module.model.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(tensor, expected), name
    for update, metrics in zip(updates, seen.metrics[accumulate - 1 :: accumulate], strict=True):
        assert update.pop("tokens") == 64 * accumulate
        assert {name: metrics[name] for name in update} == pytest.approx(update, rel=1e-6)
    assert 0 < seen.biases[-1].abs().max() <= 0.01 * 4 / accumulate + 1e-6

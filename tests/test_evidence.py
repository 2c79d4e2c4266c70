"""A delay of one update hurts AdamW more than Muon, and Error Feedback helps: the paper's claim in two minutes."""

from __future__ import annotations

import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_asyncpp import DelayedGradientStrategy, GPTModule
from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW

CONTEXT, STEPS = 32, 200
OPTIMIZERS: dict[str, tuple[Any, tuple[float, ...]]] = {
    "AdamW": (partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1), (0.002, 0.004, 0.008)),
    "Muon": (partial(MuonAdamW, newton_schulz_dtype="float32"), (0.01, 0.02, 0.04)),
}


@pytest.fixture(scope="module")
def corpus() -> tuple[Tensor, Tensor]:
    """Return bytes of the standard library, (rows, CONTEXT + 1), for training and for validation."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:80]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    rows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return rows[:-2000], rows[-2000:]


def loss_after_training(corpus: tuple[Tensor, Tensor], optimizer: Any, delay: int, seed: int) -> float:
    L.seed_everything(seed, verbose=False)
    config = {"vocab_size": 256, "context_length": CONTEXT, "num_layers": 2, "dim": 48, "num_heads": 2}
    module = GPTModule(config, optimizer=optimizer, warmup_steps=15)  # type: ignore[arg-type]
    trainer = L.Trainer(
        strategy=DelayedGradientStrategy(delay=delay), devices=1, accelerator="cpu", max_steps=STEPS, logger=False,
        gradient_clip_val=1.0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(corpus[0], batch_size=16, shuffle=True))  # type: ignore[arg-type]
    return trainer.validate(module, DataLoader(corpus[1], batch_size=500), verbose=False)[0]["val_loss"]  # type: ignore[arg-type]


def losses(corpus: tuple[Tensor, Tensor], name: str) -> tuple[float, float, float]:
    """Return mean losses of two seeds: without and with delay, at their best lr; with Error Feedback at the latter."""
    make, rates = OPTIMIZERS[name]

    def mean(optimizer: Any, delay: int) -> float:
        return sum(loss_after_training(corpus, optimizer, delay, seed) for seed in (1, 2)) / 2

    def best(delay: int) -> Any:
        return min((partial(make, lr=lr) for lr in rates), key=lambda o: loss_after_training(corpus, o, delay, 1))

    delayed = best(1)
    return mean(best(0), 0), mean(delayed, 1), mean(partial(ErrorFeedback, base=delayed), 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_delay_costs_adamw_more_than_muon_and_error_feedback_gives_a_part_back(corpus: Any) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        adamw, muon = losses(corpus, "AdamW"), losses(corpus, "Muon")
    finally:
        torch.set_num_threads(threads)
    gaps = {name: delayed - fresh for name, (fresh, delayed, _) in {"AdamW": adamw, "Muon": muon}.items()}
    shares = {
        name: (delayed - corrected) / gaps[name]
        for name, (_, delayed, corrected) in {"AdamW": adamw, "Muon": muon}.items()
    }
    print(f"losses: AdamW {adamw}, Muon {muon}; gaps {gaps}; shares {shares}")
    assert gaps["AdamW"] > gaps["Muon"] > 0.03
    assert all(0.2 < share < 1 for share in shares.values())
    assert muon[1] < adamw[0], "delayed Muon was better than fresh AdamW"

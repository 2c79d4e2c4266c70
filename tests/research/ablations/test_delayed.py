"""Training with whole batches on two weight versions equals training with the pipeline's engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_asyncpp import DelayedGradientStrategy, GPTModule
from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW, WeightPrediction
from research.ablations.delayed import DelayedGPT, DelayedGPTModule, rounded

MODEL = {"vocab_size": 32, "context_length": 8, "num_layers": 4, "dim": 16, "num_heads": 2}
MUON = partial(MuonAdamW, lr=0.05, newton_schulz_dtype=torch.float64)
OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=0.02, eps=1e-3),
    "EF": partial(ErrorFeedback, base=MUON),
    "ahead": partial(WeightPrediction, ahead=1.0, base=MUON),
}


class Losses(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))


def train(
    module: GPTModule, strategy: Any = "auto", updates: int = 5, resumed: Path | None = None, saved: Path | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(3)
    batches = torch.randint(32, (6 * 9, 9))
    losses = Losses()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, precision="64-true", max_steps=updates, gradient_clip_val=0.3,
        callbacks=[losses], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    first = 0 if resumed is None else torch.load(resumed, weights_only=False)["global_step"]
    loader = torch.utils.data.DataLoader(batches.roll(-9 * first, 0), batch_size=9)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=resumed)
    if saved is not None:
        trainer.save_checkpoint(saved)
    assert module.model is not None
    return losses.seen, {name: p.detach().clone() for name, p in module.model.named_parameters()}


@pytest.mark.parametrize(
    ("pipeline", "optimizer"),
    [
        ({"stages": 3, "microbatches": 4}, "EF"),
        ({"stages": 3, "microbatches": 4}, "ahead"),
        ({"stages": 2, "microbatches": 4, "lookahead": 2}, "EF"),
        ({"stages": 3, "microbatches": 4, "synchronous_start": 3}, "EF"),
        ({"stages": 2, "microbatches": 4, "slack": "exact"}, "EF"),
        ({"stages": 2, "microbatches": 2, "staleness": "uniform"}, "EF"),
        ({"delay": 1}, "AdamW"),
        ({"delay": 0}, "ahead"),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_it_trains_like_the_pipeline(pipeline: dict[str, Any], optimizer: str, tied: bool) -> None:
    arguments: dict[str, Any] = {"config": {**MODEL, "tie_embeddings": tied}, "optimizer": OPTIMIZERS[optimizer]}
    L.seed_everything(1)
    losses, weights = train(GPTModule(**arguments), DelayedGradientStrategy(**pipeline))
    L.seed_everything(1)
    found, same = train(DelayedGPTModule(pipeline=pipeline, **arguments))
    assert found == pytest.approx(losses, abs=3e-6)  # the loss is computed in fp32
    for name, weight in weights.items():
        torch.testing.assert_close(same[name], weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["EF", "ahead"])
@pytest.mark.parametrize("bounds", [{"synchronous_start": 2}, {"end": 3}])
def test_the_delay_begins_and_ends_like_a_resumed_training(
    bounds: dict[str, int], optimizer: str, tmp_path: Path
) -> None:
    pipeline: dict[str, Any] = {"stages": 3, "microbatches": 4}
    arguments: dict[str, Any] = {"config": MODEL, "optimizer": OPTIMIZERS[optimizer], "decay": "constant"}
    strategies = [{"delay": 0}, pipeline] if "end" not in bounds else [pipeline, {"delay": 0}]
    (switch,) = bounds.values()
    losses: list[float] = []
    for end, before, after in ((switch, None, tmp_path / "a.ckpt"), (5, tmp_path / "a.ckpt", None)):
        L.seed_everything(1)
        strategy = DelayedGradientStrategy(**strategies.pop(0))
        part, weights = train(GPTModule(**arguments), strategy, end, before, after)
        losses += part
    L.seed_everything(1)
    found, same = train(DelayedGPTModule(pipeline={**pipeline, **bounds}, **arguments))
    assert found == pytest.approx(losses, abs=3e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(same[name], weight, rtol=0, atol=1e-5)


def test_the_previous_norm_clips_from_the_second_update_on() -> None:
    results = []
    for norm in ("schedule", "previous", "larger"):  # on one stage, "larger" is at least the own norm
        L.seed_everything(1)
        module = DelayedGPTModule({"delay": 0}, norm=norm, config=MODEL, optimizer=OPTIMIZERS["AdamW"])  # type: ignore[arg-type]
        results.append(train(module, updates=3)[0])
    assert results[0][:2] == results[1][:2]
    assert results[0][2] != results[1][2] != results[2][2]


@pytest.mark.parametrize(("wire", "error"), [("bf16", 2**-8), ("fp8", 2**-4), ("int8", 1 / 127)])
def test_rounding_at_the_cuts(wire: Any, error: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn_like(x)
    y = rounded(x, wire)
    y.backward(gradient)
    assert x.grad is not None
    for exact, found in ((x.detach(), y.detach()), (gradient, x.grad)):
        bound = error * (exact.abs().amax(-1, keepdim=True) if wire == "int8" else exact.abs().clamp_min(0.02))
        assert (found - exact).abs().max() > 0
        assert bool(((found - exact).abs() <= bound).all())


def test_a_model_rounds_between_stages_only() -> None:
    module = GPTModule(config=MODEL)
    module.configure_model()
    assert module.model is not None
    tokens = torch.randint(32, (4, 8))
    exact = module.model(tokens)
    whole = DelayedGPT(module.model, {"delay": 0}, "int8")(tokens, 0)
    cut = DelayedGPT(module.model, {"stages": 2, "microbatches": 2}, "int8")(tokens, 0)
    assert torch.equal(whole, exact)
    assert not torch.equal(cut, exact)

"""A model that knows nothing of pipelines, such as nanoGPT's: every strategy cuts it, and all train it alike."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_asyncpp import ConfigurationError, DelayedGradientStrategy, fabric
from lightning_asyncpp.trainer import AsyncPipelineStrategy
from tests.helpers.oracle import assert_equal_weights, joined_parts
from tests.helpers.pool import Pools
from tests.helpers.trainer import arrays

VOCABULARY, TIME, DIM, STAGES, STEPS = 13, 6, 8, 2, 5
MICROBATCHES = {"microbatches": 4}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, DIM)
        return x + self.dropout(F.gelu(self.linear(self.norm(x))))


class GPT(nn.Module):
    """Made as nanoGPT is: a dictionary of modules, tied weights, dropout before the blocks, the loss in ``forward``."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(VOCABULARY, DIM), "wpe": nn.Embedding(TIME, DIM), "drop": nn.Dropout(0.1),
            "h": nn.ModuleList(Block() for _ in range(blocks)), "ln_f": nn.LayerNorm(DIM),
        })  # fmt: skip
        self.lm_head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        places = torch.arange(tokens.size(1), device=tokens.device)
        x = self.transformer.drop(self.transformer.wte(tokens) + self.transformer.wpe(places))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LitGPT(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.network = GPT()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.network(*batch)[1]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches() -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(VOCABULARY, (STEPS, 8, TIME + 1), generator=torch.Generator().manual_seed(0))
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def fit(pipeline: bool, module: L.LightningModule | None = None) -> dict[str, Any]:
    """Weights after a training by the Trainer; in a pipeline those of this stage."""
    L.seed_everything(1, verbose=False)
    module = module or LitGPT()
    strategy = AsyncPipelineStrategy(**MICROBATCHES) if pipeline else emulated(DelayedGradientStrategy)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=STAGES if pipeline else 1, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches(), batch_size=None))
    return arrays(dict(strategy.session.stage.parameters if pipeline else module.network.named_parameters()))


def loop(pipeline: bool, to_device: bool = False) -> dict[str, Any]:
    """The same in Fabric."""
    strategy = fabric.AsyncPipelineStrategy(**MICROBATCHES) if pipeline else emulated(fabric.DelayedGradientStrategy)
    run = L.Fabric(strategy=strategy, accelerator="cpu", devices=STAGES if pipeline else 1)
    run.launch()
    run.seed_everything(1, verbose=False)
    torch.manual_seed(3)
    model = run.setup_module(run.to_device(GPT()) if to_device else GPT())
    optimizer = run.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for batch in batches():
        strategy.training_step(lambda part: model(*part)[1], batch)
        optimizer.step()
        optimizer.zero_grad()
    strategy.drain()
    return arrays(dict(strategy.session.stage.parameters if pipeline else model.module.named_parameters()))


def emulated(strategy: Any) -> Any:
    return strategy(stages=STAGES, **MICROBATCHES)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Of the emulated pipeline in the Trainer; the tied weight has the first of its names."""
    return fit(pipeline=False)


@pytest.mark.parametrize("run", [fit, loop])
def test_a_pipeline_trains_it_as_one_process_does(pools: Pools, run: Any, expected: dict[str, Any]) -> None:
    last, first = pools.run(STAGES, run, True)  # rank 0 has the last stage
    assert (last.pop("transformer.wte.weight") == first["transformer.wte.weight"]).all()
    assert_equal_weights(joined_parts([first, last]), expected)


def test_fabric_in_one_process_does_so_too(expected: dict[str, Any]) -> None:
    assert_equal_weights(loop(pipeline=False), expected)


def test_what_fabric_moves_before_it_knows_the_model_is_cut_later(pools: Pools, expected: dict[str, Any]) -> None:
    parts = pools.run(STAGES, loop, True, True)
    assert {name for part in parts for name in part} == set(expected)


class Looped(GPT):
    """Calls a block twice."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer.wte(tokens)
        for block in (*self.transformer.h, *self.transformer.h):
            x = block(x)
        logits = self.lm_head(x)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Looped, "which the pipeline cannot cut"),
        (lambda: nn.Sequential(nn.Linear(1, 1), nn.ReLU()), "fewer than the 2"),
    ],
)
def test_one_process_refuses_what_no_pipeline_could_do(model: Any, why: str) -> None:
    run = L.Fabric(strategy=emulated(fabric.DelayedGradientStrategy), accelerator="cpu", devices=1)
    run.launch()
    with pytest.raises(ConfigurationError, match=why):
        run.setup_module(model())


def test_a_pipeline_refuses_it_in_fabric_as_in_the_trainer(pools: Pools) -> None:
    for outcome in pools.outcomes(STAGES, set_up, Looped):
        assert outcome.error == "ConfigurationError"
        assert "the model is a Looped, which the pipeline cannot cut" in outcome.message


def set_up(model: Any) -> None:
    run = L.Fabric(strategy=fabric.AsyncPipelineStrategy(), accelerator="cpu", devices=STAGES)
    run.launch()
    run.setup_module(model())

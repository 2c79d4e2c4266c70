"""A GPT with experts has the same weights, biases and metrics in pipelines and under DDP as in one process."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np
import pytest
from torch.utils.data import DataLoader

from lightning_asyncpp import GPTModule
from lightning_asyncpp.models import GPTConfig, MoEConfig
from tests.helpers.oracle import assert_equal_weights
from tests.helpers.pool import Pools
from tests.helpers.trainer import Run, Tokens, fit, make_trainer, report, staged, train


def gpt(run: Run, dropout: float = 0.1, balance_loss: float = 0.1, recompute: Any = "selective") -> GPTModule:
    """Return a GPT with three blocks, two of which have experts."""
    moe = MoEConfig(
        4, 2, expert_dim=8, router="sigmoid", num_shared_experts=1, num_dense_layers=1, balance_loss=balance_loss,
        balance_bias_rate=0.01,
    )  # fmt: skip
    config = GPTConfig(32, 8, num_layers=3, dim=16, num_heads=2, mlp_dim=32, dropout=dropout, init_std=0.1, moe=moe)
    return GPTModule(config, optimizer=run.make_optimizer, decay="constant", activation_checkpointing=recompute)


RUN = Run(
    gpt, "async", {"microbatches": 3}, dataset="tokens", samples=36, batch_size=6,
    trainer={"gradient_clip_val": 0.5, "logger": "list"},
)  # fmt: skip
BIASES = [f"model.blocks.{layer}.mlp.router.balance_bias" for layer in (1, 2)]
METRICS = {"moe_load_max", "moe_load_min", "moe_entropy"}


def of_experts(result: dict[str, Any]) -> list[dict[str, float]]:
    found = ({name: value for name, value in record.items() if name in METRICS} for _, record in result["records"])
    return [record for record in found if record]


def test_a_pipeline_is_the_same_run_in_one_process(pools: Pools) -> None:
    """Recomputed blocks use the weights and biases of their forwards, and log nothing twice."""
    ranks = pools.run(3, fit, RUN)
    expected = train(staged(replace(RUN, module=functools.partial(gpt, recompute="none")), 1))
    biases = {name: expected["buffers"][name] for name in BIASES}
    assert_equal_weights(ranks[0]["full_at_end"], {**expected["weights"], **biases})
    assert max(float(np.abs(bias).max()) for bias in biases.values()) > 0.015  # moved at least twice by 0.01
    assert len(of_experts(ranks[0])) == 6
    assert of_experts(ranks[0]) == of_experts(expected)


def fit_share(run: Run) -> dict[str, Any]:
    """Train on this rank's share of every batch; without padding, the ranks' means have equal weights."""
    L.seed_everything(run.seed, verbose=False)
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    batches = Tokens(run.samples).tokens.clamp_min(0).unflatten(0, (-1, run.batch_size))
    share = batches.chunk(ranks, dim=1)[rank]
    module, trainer = run.module(run), make_trainer(run)
    trainer.fit(module, DataLoader(share.flatten(0, 1), batch_size=share.shape[1]))  # type: ignore[arg-type]
    return report(trainer, module)


def test_replicas_under_ddp_count_together(pools: Pools) -> None:
    """Two halves train as the whole batch; the balance loss is off, since it is a product and not additive."""
    module = functools.partial(gpt, dropout=0.0, balance_loss=0.0)
    run = replace(RUN, strategy="ddp", options={}, optimizer="sgd", module=module, trainer={"logger": "list"})
    ranks, expected = pools.run(2, fit_share, run), fit_share(replace(run, strategy="plain"))
    for rank in ranks:
        for name in BIASES:
            np.testing.assert_array_equal(rank["buffers"][name], expected["buffers"][name], err_msg=name)
        for name, array in expected["weights"].items():
            np.testing.assert_allclose(rank["weights"][name], array, rtol=1e-4, atol=1e-6, err_msg=name)
        for found, wanted in zip(rank["metrics"], expected["metrics"], strict=True):
            assert {n: found[n] for n in METRICS} == pytest.approx({n: wanted[n] for n in METRICS}, rel=1e-5)
    assert float(np.abs(expected["buffers"][BIASES[0]]).max()) > 0.015

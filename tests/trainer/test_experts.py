"""A GPT with experts in pipelines and under DDP: the same routing, biases and metrics as in one process."""

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
from tests.helpers.pool import Pools
from tests.helpers.trainer import Run, Tokens, fit, make_trainer, report

MOE = {
    "num_experts": 4, "top_k": 2, "expert_dim": 8, "router": "sigmoid", "num_shared_experts": 1, "num_dense_layers": 1,
    "balance_loss": 0.1, "balance_bias_rate": 0.01,
}  # fmt: skip


def gpt(run: Run, dropout: float = 0.1, **options: Any) -> GPTModule:
    """Three blocks, two of them with experts; ``options`` of MoEConfig and of GPTModule."""
    moe = MoEConfig(**{name: options.pop(name, value) for name, value in MOE.items()})  # type: ignore[arg-type]
    config = GPTConfig(
        vocab_size=32, context_length=8, num_layers=3, dim=16, num_heads=2, mlp_dim=32, dropout=dropout, init_std=0.1,
        moe=moe,
    )  # fmt: skip
    return GPTModule(config, optimizer=run.make_optimizer, decay="constant", **options)


RUN = Run(
    gpt, "async", {"microbatches": 3}, dataset="tokens", samples=36, batch_size=6, optimizer="adamw",
    trainer={"gradient_clip_val": 0.5, "logger": "list"},
)  # fmt: skip
BIASES = [f"model.blocks.{layer}.mlp.router.balance_bias" for layer in (1, 2)]
METRICS = {"moe_load_max", "moe_load_min", "moe_entropy", "moe_dropped"}


def equal(ranks: list[Any], expected: dict[str, Any], how: Any) -> None:
    whole = {**expected["weights"], **{name: expected["buffers"][name] for name in BIASES}}
    assert ranks[0]["full_at_end"].keys() >= whole.keys()
    for name, array in whole.items():
        how(ranks[0]["full_at_end"][name], array, err_msg=name)
    assert max(float(np.abs(expected["buffers"][name]).max()) for name in BIASES) > 0.015  # moved twice


def one_process(**options: Any) -> dict[str, Any]:
    plain = replace(RUN, strategy="delayed", options={"delay": 1, "microbatches": 3})
    return fit(replace(plain, module=functools.partial(gpt, **options)))


@pytest.mark.parametrize(
    ("how", "stages"),
    [
        pytest.param("block", 3, marks=pytest.mark.slow),
        ("selective", 3),
        *(pytest.param(how, n, marks=pytest.mark.slow) for how, n in (("none", 3), ("block", 2))),
    ],
)
def test_a_pipeline_is_bitwise_the_same_run_in_one_process(pools: Pools, how: str, stages: int) -> None:
    """Recomputed blocks, too: each on the weights and the biases of its forward, and saying nothing twice."""
    run = replace(RUN, module=functools.partial(gpt, activation_checkpointing=how))
    ranks = pools.run(stages, fit, run)
    expected = one_process()
    equal(ranks, expected, np.testing.assert_array_equal)
    logged = [{name: value for name, value in record.items() if name in METRICS} for _, record in ranks[0]["records"]]
    wanted = [{name: value for name, value in record.items() if name in METRICS} for _, record in expected["records"]]
    assert [record for record in logged if record] == [record for record in wanted if record]
    assert sum(record.keys() >= METRICS for record in logged) == 6


@pytest.mark.slow
@pytest.mark.parametrize("how", ["none", "block", "selective"])
def test_compiled_blocks_in_a_pipeline(pools: Pools, how: str) -> None:
    compiled = functools.partial(
        gpt, dropout=0.0, activation_checkpointing=how, compile_blocks={"backend": "aot_eager", "fullgraph": True}
    )
    ranks = pools.run(3, fit, replace(RUN, module=compiled), timeout=240)
    equal(ranks, one_process(dropout=0.0), functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5))


def fit_share(run: Run) -> dict[str, Any]:
    """Train on this rank's share of every batch, without padding, so that the ranks' means weigh the same."""
    L.seed_everything(run.seed, verbose=False)
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    batches = Tokens(run.samples).tokens.clamp_min(0).unflatten(0, (-1, run.batch_size))
    share = batches.chunk(ranks, dim=1)[rank]
    module, trainer = run.module(run), make_trainer(run)
    trainer.fit(module, DataLoader(share.flatten(0, 1), batch_size=share.shape[1]))  # type: ignore[arg-type]
    return report(trainer, module)


def test_replicas_under_ddp_count_together(pools: Pools) -> None:
    """Without a loss of the balance, whose product does not add up, two halves of a batch are the batch."""
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

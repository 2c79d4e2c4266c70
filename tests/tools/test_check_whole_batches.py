"""check_model: losses that need the whole batch, hooks of the module, all problems at once, gradients of noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_asyncpp import ConfigurationError, check_model
from lightning_asyncpp.pipeline.oracle import train_reference
from lightning_asyncpp.tools.check import CheckReport
from tests.pipeline.cases import DIM
from tests.tools.test_check import batches
from tests.trainer.failures.mistakes import Manual, ParameterOutside, SeveralEvaluationsPerStep, TwoOptimizers
from tests.trainer.modules import BatchNormNet, NoisyNet, WeighingNet
from tests.trainer.runs import Net, Run

IDS = torch.randint(1, 31, (9, 6), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([6, 6, 5, 6, 6, 2, 2, 3, 2])
LABELS = IDS.roll(-1, 1).masked_fill(torch.arange(6)[None] >= LENGTHS[:, None], -100)
TOKENS = {"ids": IDS, "labels": LABELS}


def language_model(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(31, 8), nn.Linear(8, 8), *more, nn.Tanh(), nn.Linear(8, 31))


def tokens_step(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def contrastive_step(model: nn.Module, batch: Any) -> Tensor:
    z = model(batch["ids"]).mean(1)
    return F.cross_entropy(z @ z.roll(1, 1).T, torch.arange(len(z)))


class Weighs(nn.Module):
    """A module with a model, which says how many tokens count."""

    def __init__(self, key: str, *more: nn.Module) -> None:
        super().__init__()
        self.model, self.key = language_model(*more), key

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return tokens_step(self.model, batch)

    def micro_batch_weight(self, batch: Any) -> float:
        return float((batch[self.key] != -100).sum())


def compared(report: CheckReport) -> list[str]:
    return [line for line in str(report).splitlines() if line.startswith("whole batches")]


@pytest.mark.parametrize("stages", [2, 3])
def test_a_mean_over_tokens(stages: int) -> None:
    report = check_model(language_model(), [TOKENS], tokens_step, stages=stages)
    assert not report.ok
    assert not compared(report)
    last = str(report).splitlines()[-1]
    assert last.startswith("FINDING: the loss of the whole batch is not the weighted mean of its micro-batches' losses")
    assert "return float((micro_batch['labels'] != -100).sum())`" in last
    mended = check_model(Weighs("labels"), [TOKENS], stages=stages)
    assert mended.ok
    assert "micro_batch_weight" not in str(mended)
    assert len(compared(mended)) == 1
    assert not check_model(Weighs("ids"), [TOKENS], stages=stages).ok, "another number of tokens"


def test_dropout_is_switched_off_for_it() -> None:
    report = check_model(Weighs("labels", nn.Dropout(0.5)), [TOKENS])
    assert "whole batches (dropout off): loss " in str(report)
    assert report.ok
    assert not check_model(language_model(nn.Dropout(0.5)), [TOKENS], tokens_step).ok


def test_a_loss_over_the_batch() -> None:
    report = check_model(language_model(), [TOKENS], contrastive_step)
    assert "in-batch negatives" in report.findings[0]
    assert report.bitwise


def test_a_gradient_over_the_batch() -> None:
    """Advantages are normalised over the batch: the loss is the same, up to rounding, and trains otherwise."""

    def policy_step(model: nn.Module, batch: Any) -> Tensor:
        log_p = model(batch["ids"]).log_softmax(-1)[..., 0].mean(1)
        rewards = batch["ids"][:, 0].float()
        return -((log_p - log_p.detach()).exp() * (rewards - rewards.mean())).mean()

    assert any(
        "gradient" in finding or "loss" in finding
        for finding in check_model(language_model(), [TOKENS], policy_step).findings
    )


def test_a_micro_batch_without_a_target() -> None:
    labels = IDS.clone()
    labels[:5] = -100
    report = check_model(language_model(), [{"ids": IDS, "labels": labels}], tokens_step)
    assert "in 2 micro-batches: nan" in report.findings[0]
    assert "def micro_batch_weight" in report.findings[0]


def test_what_a_step_draws_is_held_constant() -> None:
    noisy = check_model(NoisyNet(Run(NoisyNet)), batches())
    assert "but for BatchNorm, the step's random numbers held constant): loss " in str(noisy)
    assert noisy.ok

    def step(model: nn.Module, batch: Any) -> Tensor:
        logits = F.dropout(model(batch["ids"]), 0.5)  # it is training by default
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    padded = check_model(language_model(), [TOKENS], step)
    assert "return float((micro_batch['labels'] != -100).sum())`" in padded.findings[0]


def permuting_step(model: nn.Module, batch: Any) -> Tensor:
    order = torch.randperm(batch["labels"].shape[1])
    return tokens_step(model, {**batch, "labels": batch["labels"][:, order]})


def failing_step(model: nn.Module, batch: Any) -> Tensor:
    if len(batch["ids"]) > 5:
        raise MemoryError("too large")
    return tokens_step(model, batch)


def nan_step(model: nn.Module, batch: Any) -> Tensor:
    return tokens_step(model, {**batch, "labels": torch.full_like(batch["labels"], -100)})


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (permuting_step, "its loss is another one each time, also in eval mode"),
        (failing_step, "with a whole batch the step raised MemoryError: too large"),
        (nan_step, "of all batches the loss is NaN or the weight 0"),
    ],
)
def test_what_cannot_be_compared_is_not_ok(step: Any, why: str) -> None:
    report = check_model(language_model(), [TOKENS], step)
    assert not report.ok
    assert not report.findings
    last = str(report).splitlines()[-1]
    assert last == f"NOT COMPARED: {report.left_out[0]}"
    assert f"whole batches were not compared with their micro-batches: {why}" in last


def test_it_says_how_layers_were_compared() -> None:
    report = check_model(language_model(), [TOKENS], tokens_step)
    assert "layers: applied in order they give what the model(...) gives, with the first micro-batch" in str(report)


def test_batch_norm_is_a_note() -> None:
    normalised = check_model(BatchNormNet(Run(BatchNormNet)), batches())
    assert "BatchNorm alone makes the difference" in str(normalised)
    assert normalised.ok
    assert check_model(WeighingNet(Run(WeighingNet)), batches()).ok


# -- hooks --------------------------------------------------------------------------------------------------------


class Clamps(Net):
    """Changes weights after a step, clips by itself, and draws noise for its batches."""

    seen: list[str]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] + torch.randn_like(batch["x"])}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_value_(self.parameters(), 0.01)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.clamp_(-0.3, 0.3)


class ClipsItsStage(Net):
    """By the norm of the parameters that it sees: in a pipeline, a stage's."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.001)


class WritesAtTheStart(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            next(self.parameters()).mul_(0.9)


class AsksInAHook(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.lightning_module.train()


@pytest.mark.parametrize("stages", [2, 3])
def test_hooks_are_part_of_what_is_compared(stages: int) -> None:
    report = check_model(Clamps(Run(Clamps)), batches(), stages=stages)
    assert report.bitwise
    assert report.losses != check_model(Net(Run(Net)), batches(), stages=stages).losses
    with pytest.raises(ConfigurationError, match="trained to something else"):
        check_model(ClipsItsStage(Run(ClipsItsStage)), batches(), stages=stages)


def test_hooks_that_cannot_be_called() -> None:
    with pytest.raises(ConfigurationError, match="on_train_batch_start changes weights"):
        check_model(WritesAtTheStart(Run(WritesAtTheStart)), batches())
    assert "Trainer and there is none: on_train_batch_end" in str(check_model(AsksInAHook(Run(AsksInAHook)), batches()))


# -- all problems at once -----------------------------------------------------------------------------------------


class Everything(ParameterOutside, Manual, TwoOptimizers):
    loss_reduction = "median"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return batch["x"].sum()


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_model(Everything(Run(Everything)), batches(), stages=2, micro_batches=1, partition=[1, 99])
    for text in ("automatic_optimization=False", "loss_reduction='median'", "outside the layers", "more than one",
                 "micro_batches=1"):  # fmt: skip
        assert text in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        check_model(Everything(Run(Everything)), batches(), stages=2)
    assert "without calling self.model" in str(caught.value)
    with pytest.raises(ConfigurationError, match="LBFGS"):
        check_model(SeveralEvaluationsPerStep(Run(SeveralEvaluationsPerStep)), batches())


# -- noise --------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 1, batch_first=True)
        nn.init.normal_(self.attention.in_proj_bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


def test_a_gradient_of_rounding_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias of an attention's keys has none: AdamW makes steps of what rounding leaves, in any direction."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), Attention(), nn.Linear(DIM, 1))
    given = [{"x": torch.randn(8, 5, DIM), "y": torch.randn(8, 5, 1)} for _ in range(3)]

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch["x"]), batch["y"])

    def in_another_order(model: nn.Module, step: Any, *rest: Any, **options: Any) -> list[float]:
        return train_reference(model, lambda batch: step({k: v.flip(0, 1) for k, v in batch.items()}), *rest, **options)

    monkeypatch.setattr("lightning_asyncpp.tools.check.model_check.train_reference", in_another_order)
    report = check_model(
        model, given, step, optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01, weight_decay=0.0)
    )
    assert report.differences["1.attention.in_proj_bias"] > 0.1
    assert report.beyond_noise is not None
    assert report.beyond_noise.get("1.attention.in_proj_bias", 0.0) < 1e-2
    assert "nothing but rounding in 1.attention.in_proj_bias" in str(report)

"""check_model: losses that need the whole batch, hooks of the module, all problems at once, gradients of noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_asyncpp import ConfigurationError, check_model
from lightning_asyncpp.reference import train_reference
from lightning_asyncpp.tools.check import CheckReport
from lightning_asyncpp.tools.check.weights import possible_weights
from tests.core.cases import DIM
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
    ],
)
def test_what_cannot_be_compared_is_not_ok(step: Any, why: str) -> None:
    report = check_model(language_model(), [TOKENS], step)
    assert not report.ok
    assert not report.findings
    last = str(report).splitlines()[-1]
    assert last == f"NOT COMPARED: {report.left_out[0]}"
    assert f"whole batches were not compared with their micro-batches: {why}" in last


class CountsNothing(Weighs):
    """A batch of padding."""

    def micro_batch_weight(self, batch: Any) -> float:
        return 0.0


def test_a_loss_that_is_not_finite_is_a_finding() -> None:
    report = check_model(language_model(), [TOKENS], nan_step)
    assert not report.ok
    assert "the loss is not finite: nan in mini-batch 0, the first of 4 among 4" in report.findings[0]
    assert "set_detect_anomaly" in report.findings[0]
    assert "of all batches the loss is NaN or the weight 0" in report.left_out[0]

    report = check_model(language_model(), [TOKENS], lambda model, batch: tokens_step(model, batch) + torch.inf)
    assert "the loss is not finite: inf in mini-batch 0" in report.findings[0]
    assert not check_model(CountsNothing("labels"), [TOKENS]).findings, "it has no loss"


def test_a_gradient_that_is_not_finite() -> None:
    with pytest.raises(ConfigurationError, match=r"the gradient is not finite.*set_detect_anomaly"):
        check_model(language_model(), [TOKENS], lambda model, batch: tokens_step(model, batch) * torch.nan)


def test_a_loss_that_is_nan_later() -> None:
    """Whole batches that have a loss agree, so there is no other finding."""
    full = {"ids": IDS, "labels": IDS.roll(-1, 1)}
    report = check_model(language_model(), [full, {**full, "labels": torch.full_like(IDS, -100)}], tokens_step)
    assert not report.ok
    (finding,) = report.findings
    assert "nan in mini-batch 1, the first of 2 among 4" in finding
    assert "whether the training diverges" in finding


# -- which weights it suggests ------------------------------------------------------------------------------------


def shifting_step(model: nn.Module, batch: Any) -> Tensor:
    logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Shifts(Weighs):
    """A causal model, weighed by its labels as they are."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return shifting_step(self.model, batch)


def padded(prompt: int = 0) -> dict[str, Tensor]:
    """As a collator of transformers gives it: masks before labels, which are the tokens."""
    mask = (torch.arange(6)[None] < LENGTHS[:, None]).long()
    labels = IDS.masked_fill((mask == 0) | (torch.arange(6)[None] < prompt), -100)
    return {"input_ids": IDS, "attention_mask": mask, "labels": labels}


LABELS_SHIFTED = "return float((micro_batch['labels'][..., 1:] != -100).sum())`"


@pytest.mark.parametrize("prompt", [0, 1])
def test_it_suggests_labels_before_masks(prompt: int) -> None:
    (finding,) = check_model(language_model(), [padded(prompt)], shifting_step).findings
    as_they_are = "return float((micro_batch['labels'] != -100).sum())`"  # the same where the first never counts
    assert (as_they_are if prompt else LABELS_SHIFTED) in finding
    if not prompt:
        (finding,) = check_model(Shifts("labels"), [padded()]).findings
        assert LABELS_SHIFTED in finding


def test_what_agrees_with_one_batch_alone_is_not_suggested() -> None:
    """The first batch has prompts, the second has none: only what is shifted agrees with both."""
    (finding,) = check_model(language_model(), [padded(1), padded()], shifting_step).findings
    assert LABELS_SHIFTED in finding


def test_a_mask_is_suggested_where_it_is_what_counts() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return shifting_step(model, {**batch, "labels": labels})

    batch = {name: value for name, value in padded().items() if name != "labels"}
    (finding,) = check_model(language_model(), [batch], step).findings
    assert "return float(micro_batch['attention_mask'][..., 1:].sum())`" in finding


def test_nothing_is_suggested_that_does_not_agree() -> None:
    (finding,) = check_model(
        language_model(), [padded()], lambda model, batch: shifting_step(model, batch) ** 2
    ).findings
    assert "Likely causes" in finding
    assert "they agree" not in finding


def test_possible_weights_of_whole_samples_are_not_shifted() -> None:
    batch = (torch.rand(4, 2), torch.tensor([1, -100, 0, 1]))
    assert [weight.text for weight in possible_weights(batch)] == ["(micro_batch[1] != -100).sum()"]


def test_it_says_how_layers_were_compared() -> None:
    report = check_model(language_model(), [TOKENS], tokens_step)
    assert "layers: applied in order they give what the model(...) gives, with 2 micro-batches of 1 batch" in str(
        report
    )


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


class OneCycle(Net):
    """As many write it: it asks its Trainer how long the training is."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=int(steps))]


class UnfitOneCycle(Net):
    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.LBFGS(self.parameters())


class AsksForMore(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01 * len(self.trainer.datamodule.names))


def test_an_optimizer_that_asks_how_long_the_training_is() -> None:
    module = OneCycle(Run(OneCycle))
    assert check_model(module, batches()).ok
    assert module._trainer is None
    with pytest.raises(ConfigurationError, match="LBFGS"):
        check_model(UnfitOneCycle(Run(UnfitOneCycle)), batches())


def test_an_optimizer_that_cannot_be_looked_at_is_left_out() -> None:
    report = check_model(AsksForMore(Run(AsksForMore)), batches())
    assert not report.ok
    assert not report.findings
    assert report.left_out[0].startswith("the module's optimizer was not looked at: configure_optimizers raised")
    assert "self.trainer.datamodule: a check has no Trainer" in str(report).splitlines()[-1]


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

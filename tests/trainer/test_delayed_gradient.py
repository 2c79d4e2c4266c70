"""Emulated delays: bitwise Lightning's own run without one, bitwise a pipeline with one, and else the rule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_asyncpp import ConfigurationError, DelayedGradientStrategy
from lightning_asyncpp.pipeline.errors import NonFiniteGradientError
from tests.trainer.pool import Pools
from tests.trainer.reference import assert_equal_weights, joined_weights, mini_batches_of, oracle
from tests.trainer.runs import CORRECTIONS, Net, Run, fit, make_scheduler


class Branches(Net):
    """No pipeline could cut this: a recurrent branch beside a convolution with batch norm, tied weights, no `model`."""

    def __init__(self, run: Run) -> None:
        L.LightningModule.__init__(self)
        self.run = run
        self.recurrent = nn.GRU(1, 4, batch_first=True)
        self.convolution = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Dropout(run.dropout))
        self.mix = nn.Linear(4, 4)
        self.back = nn.Linear(4, 4)
        self.back.weight = self.mix.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.recurrent(x.unsqueeze(-1))[0].mean(1) + self.convolution(x.unsqueeze(1)).mean(-1)
        return self.scale * self.back(self.mix(hidden).relu()).sum(-1, keepdim=True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch["x"]), batch["y"])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "seen": batch["x"].sum()}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch["x"]), batch["y"]))


def train(run: Run) -> dict[str, Any]:
    """Fit in this process."""
    return fit(replace(run, trainer={"logger": "list"} | run.trainer))


def delayed(run: Run, **options: Any) -> Run:
    return replace(run, strategy="delayed", options=options)


def by_the_rule(run: Run, delay_of: Callable[[int, int], int], limit: int | None = None) -> dict[str, np.ndarray]:
    """W_{t+1} = W_t - U(g_t), g_t taken where each parameter was its own number of updates ago.

    Args:
        run: what to train; without random layers.
        delay_of: (index of the parameter, number of parameters) -> its delay.
        limit: number of batches; all of the training set if None.
    """
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    optimizer = run.make_optimizer(list(module.named_parameters()))
    parameters = list(module.parameters())
    delays = [delay_of(i, len(parameters)) for i in range(len(parameters))]
    if hasattr(optimizer, "set_delay"):
        optimizer.set_delay(dict(zip(parameters, delays)))
    scheduler = make_scheduler(run, optimizer)
    history = [[p.detach().clone()] for p in parameters]
    for t, (batch,) in enumerate(mini_batches_of(run, limit=limit)):
        with torch.no_grad():
            for p, versions, delay in zip(parameters, history, delays):
                p.copy_(versions[max(t - delay, 0)])
        optimizer.zero_grad()
        module.training_step(batch, t)["loss"].backward()
        with torch.no_grad():
            for p, versions in zip(parameters, history):
                p.copy_(versions[t])
        optimizer.step()
        if scheduler is not None:
            scheduler["scheduler"].step()
        for p, versions in zip(parameters, history):
            versions.append(p.detach().clone())
    return {name: p.detach().numpy() for name, p in module.named_parameters()}


SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {},
    "clipped": {"gradient_clip_val": 0.3},
    "clipped-by-value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_without_delay_it_is_bitwise_lightnings_own_run(settings: str) -> None:
    run = Run(
        Branches, "plain", optimizer="adamw", scheduler="decay-step", dropout=0.2, shuffle=True, samples=37,
        val_samples=(9,), trainer={"max_epochs": 2} | SETTINGS[settings],
    )  # fmt: skip
    plain, emulated = train(run), train(delayed(run, delay=0))
    assert_equal_weights(emulated["weights"], plain["weights"])
    assert emulated["losses"] == plain["losses"]
    assert emulated["records"] == plain["records"]
    assert emulated["rates"] == plain["rates"]


def test_without_delay_error_feedback_leaves_the_base_optimizer_alone() -> None:
    run = Run(Branches, "plain", optimizer="muon", trainer={"max_epochs": 2})
    emulated = train(delayed(replace(run, error_feedback=True), delay=0))
    assert_equal_weights(emulated["weights"], train(run)["weights"])


@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_in_micro_batches_it_is_bitwise_the_oracle(delay: int, error_feedback: bool) -> None:
    run = Run(
        Net, optimizer="muon", error_feedback=error_feedback, scheduler="decay-step", dropout=0.2, samples=37,
        trainer={"max_epochs": 2, "gradient_clip_val": 0.4, "accumulate_grad_batches": 2},
    )  # fmt: skip
    emulated = train(delayed(run, delay=delay, micro_batches=3))
    batches = list(mini_batches_of(run, 2, accumulate=2))
    weights, losses = oracle(replace(run, strategy="sync" if delay == 0 else "async"), 3, batches, max_norm=0.4)
    assert_equal_weights(emulated["weights"], weights)
    logged = [metrics["train_loss_step"] for _, metrics in emulated["records"] if "train_loss_step" in metrics]
    assert len(logged) == len(losses)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("stages", [1, 2])
def test_in_micro_batches_it_is_bitwise_the_pipeline(pools: Pools, stages: int, precision: str) -> None:
    run = Run(
        Net, "async", {"micro_batches": 4}, optimizer="muon", error_feedback=True, scheduler="decay-step",
        dropout=0.2, shuffle=True, samples=37, val_samples=(9,),
        trainer={"max_epochs": 2, "gradient_clip_val": 0.4, "precision": precision, "logger": "list"},
    )  # fmt: skip
    pipeline = pools.run(stages, fit, run)
    emulated = train(delayed(run, delay=1, micro_batches=4))
    assert_equal_weights(emulated["weights"], joined_weights(pipeline, stages))
    assert emulated["rates"] == pipeline[0]["rates"]

    def losses(records: list[Any]) -> dict[int, float]:
        return {step: m["train_loss_step"] for step, m in records if "train_loss_step" in m}

    assert losses(emulated["records"]) == pytest.approx(losses(pipeline[0]["records"]), rel=1e-6)
    for name, value in pipeline[0]["callback_metrics"].items():
        assert emulated["callback_metrics"][name] == pytest.approx(value, rel=1e-2 if "bf16" in precision else 1e-5)


@pytest.mark.parametrize("optimizer", ["normuon", "soap", "adan", "lion", "mars"])
def test_every_optimizer_steps_in_the_pipeline_as_here(pools: Pools, optimizer: str) -> None:
    check_against_the_pipeline(pools, Run(Net, optimizer=optimizer, error_feedback=True))


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_acts_in_the_pipeline_as_here(pools: Pools, correction: str) -> None:
    check_against_the_pipeline(pools, Run(Net, optimizer="muon", correction=correction))


@pytest.mark.parametrize("stages", [2, 3])
def test_a_fresh_last_stage_trains_in_the_pipeline_as_here(pools: Pools, stages: int) -> None:
    run = Run(
        Net, "async", {"micro_batches": 3, "fresh_last_stage": True}, optimizer="muon", error_feedback=True,
        scheduler="decay-step", dropout=0.2, shuffle=True, samples=37, val_samples=(9,),
        trainer={"max_epochs": 2, "gradient_clip_val": 0.4, "val_check_interval": 2, "logger": "list"},
    )  # fmt: skip
    pipeline = pools.run(stages, fit, run)
    emulated = train(delayed(run, delay="fresh_last_stage", stages=stages, micro_batches=3))
    assert_equal_weights(emulated["weights"], joined_weights(pipeline, stages))
    other = train(delayed(run, delay=1, micro_batches=3))
    assert not np.array_equal(other["weights"]["model.0.weight"], emulated["weights"]["model.0.weight"])
    assert emulated["callback_metrics"]["val_loss"] == pytest.approx(pipeline[0]["callback_metrics"]["val_loss"])


def check_against_the_pipeline(pools: Pools, run: Run) -> None:
    """Bitwise, with everything that an optimizer may notice."""
    run = replace(
        run, strategy="async", options={"micro_batches": 3}, scheduler="decay-step", samples=60,
        trainer={"gradient_clip_val": 0.4},
    )  # fmt: skip
    pipeline = pools.run(3, fit, run)
    emulated = train(delayed(run, delay=1, micro_batches=3))
    assert_equal_weights(emulated["weights"], joined_weights(pipeline, 3))


@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("delay", [1, 2, 4])
def test_a_constant_delay_follows_the_rule(delay: int, error_feedback: bool) -> None:
    run = Run(Branches, optimizer="adamw", error_feedback=error_feedback, scheduler="decay-step", samples=60)
    emulated = train(delayed(run, delay=delay))
    assert_equal_weights(emulated["weights"], by_the_rule(run, lambda *_: delay))


@pytest.mark.parametrize("error_feedback", [False, True])
def test_pipedreams_delay_follows_the_rule(error_feedback: bool) -> None:
    run = Run(Branches, optimizer="adamw", error_feedback=error_feedback, samples=60)
    emulated = train(delayed(run, delay="pipedream", stages=3))

    def delay_of(index: int, count: int) -> int:
        stages = np.concatenate([np.full(len(part), s) for s, part in enumerate(np.array_split(np.arange(count), 3))])
        return 2 - int(stages[index])

    assert_equal_weights(emulated["weights"], by_the_rule(run, delay_of))


def recurrent_first(name: str) -> int:
    return 0 if name.startswith("recurrent") else 1


def test_a_fresh_last_stage_follows_the_rule() -> None:
    run = Run(Branches, optimizer="adamw", error_feedback=True, samples=60)
    emulated = train(delayed(run, delay="fresh_last_stage", stages=2, stage_of=recurrent_first))
    names = [name for name, _ in Branches(run).named_parameters()]
    expected = by_the_rule(run, lambda index, _: 1 - recurrent_first(names[index]))
    assert_equal_weights(emulated["weights"], expected)


@pytest.mark.parametrize("options", [{"delay": "pipedream", "stages": 1}, {"delay": "fresh_last_stage", "stages": 1}])
def test_one_stage_has_no_delay(options: dict[str, Any]) -> None:
    run = Run(Branches, "plain", error_feedback=False)
    assert_equal_weights(train(delayed(run, **options))["weights"], train(run)["weights"])


def test_weights_seen_by_callbacks_and_validation_are_the_newest() -> None:
    class Seen(L.Callback):
        def __init__(self) -> None:
            self.after_step: deque[Tensor] = deque()
            self.wrong: list[str] = []

        def check(self, where: str, module: Any) -> None:
            if self.after_step and not torch.equal(module.mix.weight.detach(), self.after_step[-1]):
                self.wrong.append(where)

        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            self.check("batch start", module)

        def on_after_backward(self, trainer: Any, module: Any) -> None:
            self.check("after backward", module)

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            self.check("before step", module)

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            now = module.mix.weight.detach().clone()
            if self.after_step and torch.equal(now, self.after_step[-1]):
                self.wrong.append("no step")
            self.after_step.append(now)

        def on_validation_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            self.check("validation", module)

    seen = Seen()
    run = Run(Branches, "delayed", {"delay": 2}, val_samples=(8,), callbacks=((lambda: seen, {}),))
    train(replace(run, trainer={"val_check_interval": 1}))
    assert len(seen.after_step) == 5
    assert seen.wrong == []


class Unfreezes(BaseFinetuning):
    """Trains the recurrent branch from the third epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.recurrent)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group(module.recurrent, optimizer, lr=0.01)


class FrozenAtFirst(Branches):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


def test_parameters_that_join_later_are_delayed_from_then_on() -> None:
    run = Run(FrozenAtFirst, "plain", callbacks=((Unfreezes, {}),), trainer={"max_epochs": 4})
    plain, fresh, old = train(run), train(delayed(run, delay=0)), train(delayed(run, delay=1))
    assert_equal_weights(fresh["weights"], plain["weights"])
    assert not np.array_equal(old["weights"]["recurrent.weight_hh_l0"], plain["weights"]["recurrent.weight_hh_l0"])


class Skips(Branches):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


def test_batches_that_the_module_skips_are_skipped() -> None:
    run = Run(Skips, "plain")
    assert_equal_weights(train(delayed(run, delay=0))["weights"], train(run)["weights"])
    train(delayed(run, delay=2))  # after a skipped batch the newest weights are back


class Breaks(Branches):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise RuntimeError("broken on purpose")
        return super().training_step(batch, batch_idx)


def test_after_an_error_the_module_holds_the_newest_weights() -> None:
    run = Run(Breaks, "delayed", {"delay": 2})
    L.seed_everything(run.seed, verbose=False)
    modules: list[Any] = []
    with pytest.raises(RuntimeError, match="on purpose"):
        train(replace(run, module=lambda run: modules.append(Breaks(run)) or modules[-1]))
    expected = by_the_rule(replace(run, module=Branches), lambda *_: 2, limit=3)
    assert_equal_weights({name: p.detach().numpy() for name, p in modules[0].named_parameters()}, expected)


class NotANumber(Branches):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return output | {"loss": output["loss"] * float("nan")} if batch_idx == 2 else output


@pytest.mark.parametrize("micro_batches", [None, 2])
def test_gradients_that_are_no_numbers_stop_training_before_the_update(micro_batches: int | None) -> None:
    with pytest.raises(NonFiniteGradientError, match=r"mini-batch 2 holds NaN or Inf \(in scale, recurrent"):
        train(Run(NotANumber, "delayed", {"micro_batches": micro_batches}))


@pytest.mark.parametrize("micro_batches", [None, 2])
def test_gradients_that_are_no_numbers_are_left_out_if_asked(micro_batches: int | None) -> None:
    options = {"nonfinite_gradients": "skip", "micro_batches": micro_batches}
    with pytest.warns(UserWarning, match="mini-batch 2: its gradient holds NaN or Inf; the update was skipped"):
        skipped = train(Run(NotANumber, "delayed", options))
    assert all(np.isfinite(array).all() for array in skipped["weights"].values())
    assert skipped["steps"] == [1, 2, 3, 4, 5]


def test_skipped_updates_agree_with_the_pipeline(pools: Pools) -> None:
    run = Run(NanNet, "async", {"micro_batches": 2, "nonfinite_gradients": "skip"}, optimizer="muon")
    pipeline = pools.run(2, fit, replace(run, error_feedback=True))
    options = {"micro_batches": 2, "nonfinite_gradients": "skip"}
    emulated = train(delayed(replace(run, error_feedback=True), **options))
    assert_equal_weights(emulated["weights"], joined_weights(pipeline, 2))


class NanNet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 2 else loss


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"delay": -1}, ["delay=-1 must be 0 or more"]),
        ({"delay": "pipedreams"}, ["delay='pipedreams' must be", "pipedream, fresh_last_stage", "needs stages"]),
        ({"delay": "pipedream"}, ["delay='pipedream' needs stages", "got None"]),
        ({"delay": "pipedream", "stages": 0}, ["needs stages", "got 0"]),
        ({"delay": 1, "stages": 4}, ["stages has no meaning with delay=1"]),
        ({"delay": 1, "stage_of": len}, ["stage_of has no meaning with delay=1"]),
        (
            {"delay": -2, "micro_batches": 0, "nonfinite_gradients": "hide"},
            ["3 problems", "delay=-2", "micro_batches=0", "nonfinite_gradients='hide'"],
        ),
    ],
)
def test_wrong_arguments_are_named_all_at_once(options: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        DelayedGradientStrategy(**options)
    assert all(message in str(caught.value) for message in messages)


class Manual(Branches):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.automatic_optimization = False
        self.loss_reduction = "median"


class TwoOptimizers(Branches):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.mix.parameters()), torch.optim.SGD(self.convolution.parameters())]


class ByLBFGS(Branches):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class ForeignParameters(Branches):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(nn.Linear(2, 3).parameters())


class NoGradient(Branches):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"].detach()


@pytest.mark.parametrize(
    ("module", "options", "messages"),
    [
        (Manual, {"micro_batches": 2}, ["2 problems", "automatic_optimization=False", "loss_reduction='median'"]),
        (ByLBFGS, {}, ["LBFGS evaluates the loss several times"]),
        (ForeignParameters, {}, ["2 tensor(s), the first of shape (3, 2), that are no parameters"]),
        (NoGradient, {"micro_batches": 2}, ["does not depend on the module's parameters"]),
        (Branches, {"delay": "pipedream", "stages": 99}, ["stages=99 is more than the module has parameters (12)"]),
        (Branches, {"delay": "pipedream", "stages": 2, "stage_of": len}, ["stage_of('scale') returned 5", "0 to 1"]),
    ],
)
def test_what_cannot_be_trained_so_is_refused(module: Any, options: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        train(Run(module, "delayed", options))
    assert all(message in str(caught.value) for message in messages), caught.value


def test_several_optimizers_are_refused() -> None:
    with pytest.raises((ConfigurationError, RuntimeError), match="multiple optimizers"):
        train(Run(TwoOptimizers, "delayed"))


def test_the_name_is_registered_and_needs_no_launcher() -> None:
    trainer = L.Trainer(strategy="delayed_gradient", accelerator="cpu", devices=1, logger=False)
    assert isinstance(trainer.strategy, DelayedGradientStrategy)
    assert trainer.strategy.settings.delay == 1
    assert trainer.strategy.launcher is None
    assert not torch.distributed.is_initialized()


def test_evaluation_needs_nothing() -> None:
    run = Run(Net, "delayed", val_samples=(9,))
    trainer = L.Trainer(strategy=DelayedGradientStrategy(delay=2), accelerator="cpu", devices=1, logger=False)
    from tests.trainer.runs import val_loaders

    metrics = trainer.validate(Net(run), val_loaders(run), verbose=False)
    plain = L.Trainer(accelerator="cpu", devices=1, logger=False)
    assert metrics[0]["val_loss"] > 0
    torch.manual_seed(0)
    module = Net(run)
    assert trainer.validate(module, val_loaders(run), verbose=False) == plain.validate(
        module, val_loaders(run), verbose=False
    )

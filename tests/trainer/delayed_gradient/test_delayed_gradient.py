"""Emulated delays: bitwise Lightning's own run without one, and else the rule."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_asyncpp import ConfigurationError, DelayedGradientStrategy
from lightning_asyncpp.errors import NonFiniteGradientError
from tests.trainer.delayed_gradient.delays import Branches, by_the_rule, delayed, train
from tests.trainer.reference import assert_equal_weights
from tests.trainer.runs import Net, Run, loader, val_loaders

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


@pytest.mark.parametrize(("delay", "micro_batches"), [(1, None), (1, 2), (0, None)])
def test_gradients_that_are_no_numbers_stop_training_before_the_update(delay: int, micro_batches: int | None) -> None:
    with pytest.raises(NonFiniteGradientError, match=r"mini-batch 2 holds NaN or Inf \(in scale, recurrent"):
        train(Run(NotANumber, "delayed", {"delay": delay, "micro_batches": micro_batches}))


@pytest.mark.parametrize("micro_batches", [None, 2])
def test_gradients_that_are_no_numbers_are_left_out_if_asked(micro_batches: int | None) -> None:
    options = {"nonfinite_gradients": "skip", "micro_batches": micro_batches}
    with pytest.warns(UserWarning, match="mini-batch 2: its gradient holds NaN or Inf; the update was skipped"):
        skipped = train(Run(NotANumber, "delayed", options))
    assert all(np.isfinite(array).all() for array in skipped["weights"].values())
    assert skipped["steps"] == [1, 2, 3, 4, 5]


def test_the_name_is_registered_and_needs_no_launcher() -> None:
    trainer = L.Trainer(strategy="delayed_gradient", accelerator="cpu", devices=1, logger=False)
    assert isinstance(trainer.strategy, DelayedGradientStrategy)
    assert trainer.strategy.settings.delay == 1
    assert trainer.strategy.launcher is None
    assert not torch.distributed.is_initialized()


def test_evaluation_needs_nothing() -> None:
    run = Run(Net, "delayed", val_samples=(9,))
    trainer = L.Trainer(strategy=DelayedGradientStrategy(delay=2), accelerator="cpu", devices=1, logger=False)
    metrics = trainer.validate(Net(run), val_loaders(run), verbose=False)
    plain = L.Trainer(accelerator="cpu", devices=1, logger=False)
    assert metrics[0]["val_loss"] > 0
    torch.manual_seed(0)
    module = Net(run)
    assert trainer.validate(module, val_loaders(run), verbose=False) == plain.validate(
        module, val_loaders(run), verbose=False
    )


class SavesInHooks(L.Callback):
    """Saves where the parameters hold older weights, and notes the newest ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest: dict[int, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.newest[trainer.global_step] = module.mix.weight.detach().clone()

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def test_a_checkpoint_between_forward_and_backward_holds_the_newest_weights_and_changes_nothing(tmp_path: Path) -> None:
    run = Run(Branches, "delayed", {"delay": 2}, samples=60)
    saves = SavesInHooks(tmp_path)
    saved = train(replace(run, callbacks=((lambda: saves, {}),)))
    assert_equal_weights(saved["weights"], train(run)["weights"])
    for step in (1, 4, 6):
        state = torch.load(tmp_path / f"{step}.ckpt", weights_only=True)["state_dict"]
        assert torch.equal(state["mix.weight"], saves.newest[step])


class SavesBeforeTheStep(L.Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        trainer.save_checkpoint("nowhere.ckpt")


def test_a_checkpoint_while_the_update_is_applied_is_refused() -> None:
    with pytest.raises(RuntimeError, match="do that in on_train_batch_end"):
        train(Run(Branches, "delayed", callbacks=((SavesBeforeTheStep, {}),)))


class Thaws(FrozenAtFirst):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.mix.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.mix.requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_parameters_that_thaw_are_trained_in_micro_batches_too() -> None:
    run = Run(Thaws, "delayed", {"delay": 0, "micro_batches": 1}, trainer={"max_epochs": 2})
    whole = train(replace(run, options={"delay": 0}))
    for name, array in train(run)["weights"].items():
        np.testing.assert_allclose(array, whole["weights"][name], rtol=1e-4, atol=1e-6, err_msg=name)


class Twice(torch.optim.SGD):
    """Evaluates its closure twice, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class ByTwice(Branches):
    def configure_optimizers(self) -> Any:
        return Twice(self.parameters(), lr=0.05)


def test_optimizers_that_evaluate_twice_work_without_delay_and_are_refused_with_one() -> None:
    run = Run(ByTwice, "plain")
    assert_equal_weights(train(delayed(run, delay=0))["weights"], train(run)["weights"])
    with pytest.raises(ConfigurationError, match="evaluates the loss several times per step"):
        train(delayed(run, delay=1))


def test_evaluating_in_between_does_not_lose_the_older_weights(tmp_path: Path) -> None:
    run = Run(Net, "delayed", {"delay": 2}, val_samples=(8,))
    trainer = L.Trainer(
        strategy=DelayedGradientStrategy(delay=2), accelerator="cpu", devices=1, logger=False, max_epochs=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Net(run)
    trainer.fit(module, loader(run))
    trainer.validate(module, val_loaders(run), verbose=False)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    state = torch.load(tmp_path / "after.ckpt", weights_only=True)["delayed_gradient"]
    assert state["mini_batch"] == 5
    assert all(len(older) == 2 for older in state["older_weights"].values())


def test_a_precision_plugin_is_given_back_as_it_was() -> None:
    plugin = MixedPrecision("bf16-mixed", "cpu")
    run = Run(Net, "delayed", {"micro_batches": 2}, trainer={"plugins": [plugin], "gradient_clip_val": 0.1})
    train(run)
    assert "clip_grad_by_norm" not in vars(plugin)


class ComplexNet(Branches):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.phase = nn.Parameter(torch.ones(1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.phase * self.phase.conj()).real


def test_complex_parameters_are_trained() -> None:
    run = Run(ComplexNet, "plain", optimizer="sgd")
    assert_equal_weights(train(delayed(run, delay=0))["weights"], train(run)["weights"])
    train(delayed(run, delay=2))


class Unweighed(Net):
    """Weighs a micro-batch by what is no weight."""

    def micro_batch_weight(self, micro_batch: dict[str, Tensor]) -> float:
        return -float(len(micro_batch["x"]))


def test_a_weight_that_is_none_is_refused_as_by_a_pipeline() -> None:
    run = Run(Unweighed, "plain", trainer={"max_epochs": 1})
    with pytest.raises(ConfigurationError, match=r"micro_batch_weight\(micro_batch\) returned -"):
        train(delayed(run, micro_batches=2))


class Weightless(Net):
    """Says that nothing counts."""

    def micro_batch_weight(self, micro_batch: dict[str, Tensor]) -> float:
        return 0.0


def test_mini_batches_without_weight_are_told_of_once() -> None:
    run = Run(Weightless, "plain", trainer={"max_epochs": 1})
    with pytest.warns(UserWarning, match="mini-batch 0: micro_batch_weight returned 0 for all") as told:
        train(delayed(run, micro_batches=2))
    assert len([warning for warning in told if "returned 0 for all" in str(warning.message)]) == 1

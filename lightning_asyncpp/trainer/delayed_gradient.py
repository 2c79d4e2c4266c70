"""The Trainer strategy ``delayed_gradient``: is asynchronous training safe for my model? No pipeline needed to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import lightning as L
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_asyncpp.auxiliary import collecting
from lightning_asyncpp.core.batches.batch_output import or_nan
from lightning_asyncpp.core.batches.user_hooks import UserHooks
from lightning_asyncpp.core.cut.network import name_in_steps, network_in
from lightning_asyncpp.core.cut.partition_choice import Example
from lightning_asyncpp.core.emulator.delay_emulator import DelayEmulator
from lightning_asyncpp.core.optimizers.steps import OneGradient, StepGuard
from lightning_asyncpp.core.randomness import derive
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.strategy_parts.arguments import check_arguments, for_ddp, takes
from lightning_asyncpp.strategy_parts.delayed_mixin import DelayedStrategyMixin
from lightning_asyncpp.strategy_parts.shuffling import shuffles
from lightning_asyncpp.trainer import private
from lightning_asyncpp.trainer.arguments import DelayArguments, TrainersDDPArguments
from lightning_asyncpp.trainer.checkpoint.delayed_checkpoints import DelayedCheckpoints
from lightning_asyncpp.trainer.checkpoint.loop_state import accumulate_as_scheduled
from lightning_asyncpp.trainer.checkpoint.progress import Progress
from lightning_asyncpp.trainer.checkpoint.validation_randomness import drawing_from
from lightning_asyncpp.trainer.hooks.batch_ends import ModuleFirst
from lightning_asyncpp.trainer.logging.whole_model_log import MicroBatchLog, StatisticsLog
from lightning_asyncpp.trainer.module_facts import modules_example
from lightning_asyncpp.trainer.preemption import StopOnSignal
from lightning_asyncpp.trainer.refusals import NOTHING_TO_STEP, delayed_problems


class DelayedGradientStrategy(DelayedStrategyMixin, DelayedCheckpoints, DDPStrategy):
    """Emulates the gradient delay of asynchronous pipelines, on one device or under DDP, for any LightningModule.

    Mini-batch t runs forward and backward on W_{max(t-d, 0)}, and W_{t+1} = W_t - U(g_t): the trajectory of a pipeline,
    without a pipeline. Nothing is asked of the module's structure; optimization must be automatic. Callbacks,
    validation and checkpoints see the newest weights.

    With ``delay=0`` and whole batches it is bitwise the run that Lightning does without it; with ``delay=1`` and a
    pipeline's ``micro_batches`` it is bitwise ``async_pipeline``, whose summation order, clipping and random
    numbers it then takes over. It costs d further copies of the weights.

    Arguments: :class:`~lightning_asyncpp.trainer.arguments.DelayArguments`.

    Raises:
        ConfigurationError: the arguments do not fit together, all of them at once; or when training starts, the module
            cannot be trained so.
    """

    @takes(DelayArguments)
    def __init__(self, arguments: DelayArguments) -> None:
        super().__init__(
            **for_ddp(TrainersDDPArguments, arguments), find_unused_parameters=arguments.find_unused_parameters
        )
        check_arguments(arguments, arguments)
        self.settings = arguments
        self.emulator: DelayEmulator | None = None
        self._emulated: LightningModule | None = None
        self._is_training = False
        self._micro_batch_log: MicroBatchLog | None = None
        self._loaded_state: Mapping[str, Any] | None = None
        self._statistics_log = StatisticsLog()
        self._stop_on_signal: StopOnSignal | None = None
        self._module_first: ModuleFirst | None = None
        self._step_guard: StepGuard | None = None
        self.progress = Progress()

    # -- set-up ---------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        if self._alone:
            super(ParallelStrategy, self).setup_environment()
            self.set_world_ranks()
            if self.settings.micro_batches is not None:
                reset_seed()  # as launchers do: data drawn from the process's generators is a pipeline's, too
        else:
            super().setup_environment()

    @override
    def _setup_model(self, model: Module) -> Module:  # type: ignore[override]
        return model if self._alone else super()._setup_model(model)

    @override
    def configure_ddp(self) -> None:
        if self.settings.micro_batches is None:
            super().configure_ddp()
        else:
            self._share_weights(self._module)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        if problems := delayed_problems(self.settings, self._module, trainer):
            raise ConfigurationError.from_problems(problems)
        module = self._module
        self._cut_as_a_pipeline(network_in(module), module.example_input_array, name_in_steps(module))
        training = trainer.state.fn == TrainerFn.FITTING
        if training or self._emulated is not self._module:
            self.emulator = self._emulated = None
        if self._alone:
            if self.settings.micro_batches is None:  # else the order of a pipeline's data, too
                private.keep_samplers(trainer)
            else:
                private.shuffle_only(trainer, shuffles)
            super(ParallelStrategy, self).setup(trainer)
        else:
            super().setup(trainer)
        self._stop_on_signal = StopOnSignal(trainer, self.progress)
        self._stop_on_signal.install(trainer)
        self._module_first = ModuleFirst(self._module)
        self._module_first.install(trainer)
        if training:
            self._start()

    def _start(self) -> None:
        module = self._module
        if len(self.optimizers) != 1:
            raise ConfigurationError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers: a delayed gradient has exactly one"
                " update; use one optimizer with parameter groups (MuonAdamW splits its parameters by itself)"
            )
        network = network_in(module)
        hooks = UserHooks.of(module, forward_context=self.precision_plugin.train_step_context)
        micro_batches = self._micro_batch_gradient(module, network, hooks)
        if micro_batches is not None:
            self._micro_batch_log = MicroBatchLog(module, self.world_size)
            self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        if micro_batches is not None:  # as in a pipeline; otherwise, without delay, this is Lightning's own run
            private.run_validations_in(module.trainer, self.progress.validations.apart)
        partition = self._partition(network, self._example(module, network))
        self.emulator = DelayEmulator(self.settings, module, self.optimizers[0], micro_batches, partition=partition)
        self._emulated = module
        self._is_training = True
        self._statistics_log.install(module.trainer)
        self.emulator.load_state_dict(self._loaded_state)
        self._loaded_state = None
        if micro_batches is not None and self._module_first is not None:
            self._module_first.around = self._drawing_at_batch_end
        if not self.settings.is_plain:
            self._step_guard = StepGuard(self.optimizers[0], lambda: self._running.updating)

    def _drawing_at_batch_end(self) -> AbstractContextManager[None]:
        """What hooks draw there is no part of what the training draws, as in a pipeline."""
        micro_batches = self._running.micro_batches
        assert micro_batches is not None
        return drawing_from(derive(micro_batches.seed, "batch end", micro_batches.next_micro_batch))

    def _example(self, module: LightningModule, network: nn.Module | None) -> Example | None:
        parts = self.settings.micro_batches
        if network is None or parts is None:
            return None
        return modules_example(module, network, parts, self.precision_plugin, self.root_device)

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _running(self) -> DelayEmulator:
        assert self.emulator is not None, "training has not started"
        return self.emulator

    # -- data -----------------------------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self._module.trainer
        loader = super().process_dataloader(dataloader)
        return self.progress.training_loader(loader, trainer) if trainer.training else loader

    # -- training -------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self.progress.draw_as_before()
        accumulate_as_scheduled(self._module.trainer)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        weights = self._running.weights
        if private.begins_accumulation(self._module.trainer):
            self._running.drop()  # the closure ran without a step: zero_grad() clears its gradient now
        if private.skips_backward(self._module.trainer):  # a pass for the statistics of batch norm alone
            return super().training_step(*args, **kwargs)
        if self.settings.micro_batches is not None:
            with weights.stale():
                return self._micro_batched_step(args, kwargs)
        weights.go_back()
        try:
            with collecting() as said:
                output = super().training_step(*args, **kwargs)
                self._running.counts.take(said)
        except BaseException:
            weights.come_forward()
            raise
        if output is None:  # the batch is skipped: no backward follows
            weights.come_forward()
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward on the weights of the forward, and let the parameters hold the newest ones from then on."""
        if (micro_batches := self._running.micro_batches) is not None:
            micro_batches.restore()  # zero_grad() came between
            closure_loss = self.precision_plugin.pre_backward(closure_loss, self._module)
            return self.precision_plugin.post_backward(closure_loss, self._module)
        try:
            self.pre_backward(closure_loss)
            closure_loss = self.precision_plugin.pre_backward(closure_loss, self._module)
            self.precision_plugin.backward(closure_loss, self._module, optimizer, *args, **kwargs)
        finally:
            self._running.weights.come_forward()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self._module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Take the gradient, where it belongs, and apply it to the newest weights."""
        if self._step_guard is not None:
            self._step_guard.check_same(optimizer)
        if self.settings.is_plain:
            result = super().optimizer_step(optimizer, self._checked(closure, self.precision_plugin), model, **kwargs)
            self._running.mini_batch += 1
            self._running.counts.update()
            self._statistics_log.metrics = self._running.counts.metrics
            return result
        result = closure()
        if private.skips_backward(self._module.trainer):
            return result
        if self._running.micro_batches is not None and not self._running.micro_batches.pending:
            raise ConfigurationError(NOTHING_TO_STEP)

        def step() -> None:
            once = OneGradient(optimizer, result)
            super(DelayedGradientStrategy, self).optimizer_step(optimizer, once, model, **kwargs)
            once.check_called()

        self._update(step, self.precision_plugin)
        self._statistics_log.metrics = self._running.counts.metrics
        return result

    def _micro_batched_step(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        micro_batches, log = self._running.micro_batches, self._micro_batch_log
        assert micro_batches is not None
        assert log is not None

        def step(micro_batch: Any, weight: float) -> Any:
            with log.recording(weight):
                return self._module.training_step(micro_batch, *args[1:], **kwargs)

        output = micro_batches.run(args[0], step)
        log.log_batch()
        loss = output.mean_loss(micro_batches.hooks.loss_reduction)
        return {**output.beside_loss(), "loss": or_nan(loss, self.root_device)}

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self._running.clip(float(clip_val))

    # -- the end --------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.emulator is not None:
            self.emulator.weights.come_forward()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        self._is_training, self._loaded_state = False, None
        if self._step_guard is not None:
            self._step_guard.release()
            self._step_guard = None
        self.progress.forget()
        if self._module_first is not None:
            self._module_first.release()
        if self._stop_on_signal is not None:
            self._stop_on_signal.preemption.requeue()
        super().teardown()

"""Base class of the Trainer strategies, which cut an ordinary LightningModule into pipeline stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import lightning as L
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_asyncpp.adapt import problems_of_layers
from lightning_asyncpp.core.clipping import clip_values
from lightning_asyncpp.core.cut.averages import averages_in
from lightning_asyncpp.core.cut.network import name_in_steps, network_in
from lightning_asyncpp.core.engine import Engine
from lightning_asyncpp.core.microbatch import UserHooks, or_nan
from lightning_asyncpp.core.randomness import drawing_from
from lightning_asyncpp.core.ranks.agreement import agree_on_error, agree_on_problems
from lightning_asyncpp.core.updates.update import StepInput, Update
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.strategy_parts.mixin import expect_early_schedulers
from lightning_asyncpp.strategy_parts.stage_loader import has_placeholder, shuffles
from lightning_asyncpp.trainer import private
from lightning_asyncpp.trainer.batch_ends import BatchEnds
from lightning_asyncpp.trainer.callbacks.terminal import show_stages
from lightning_asyncpp.trainer.checkpoint import Progress
from lightning_asyncpp.trainer.evaluation import EvaluationSteps
from lightning_asyncpp.trainer.launching import launch
from lightning_asyncpp.trainer.pipeline_callback import PipelineCallback
from lightning_asyncpp.trainer.set_up import (
    NOTHING_TO_STEP,
    ONE_OPTIMIZER,
    module_problems,
    modules_example,
    optimizer_problem,
    trainer_problems,
)
from lightning_asyncpp.trainer.step_log import StepLog


class PipelineStrategy(EvaluationSteps):
    """Base class of the Trainer strategies, derived from Lightning's ``DDPStrategy``.

    The engine, the weight versions and the schedule are in :mod:`lightning_asyncpp.core`; this class connects them
    to the Trainer's hooks. Processes and the process group are started as for DDP.

    Arguments as for :class:`PipelineStrategyMixin`.

    Attributes:
        gradient_norm: 2-norm of the newest update's gradient over all stages, before clipping; ``None`` before the
            first update.
    """

    # PipelineModule leaves its layers on the meta device if the strategy has this attribute.
    materializes_stages = True

    @override
    def _init_state(self) -> None:
        self.progress = Progress()
        self.step_log = StepLog(self.session)
        self._batch_ends: BatchEnds | None = None
        self._until_teardown = ExitStack()
        self._pipeline_callback: PipelineCallback | None = None
        self.gradient_norm: float | None = None
        self._draws: drawing_from | None = None

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        launcher: Any = self.launcher
        if launcher is not None and self.start_method != "popen":
            launcher.launch = functools.partial(launch, self, launcher.launch)

    # -- set-up ---------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: L.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module
        weight_dtype = self.session.settings.weight_dtype
        problems = [*trainer_problems(trainer, weight_dtype), *self._structure_problems(trainer)]
        agree_on_problems(self._mesh, problems)
        assert self.session.resolved is not None
        network, parts = self._network(), self.session.resolved.microbatches
        example = modules_example(module, network, parts, self.precision_plugin, self.root_device)
        self._cut(network, module, example, tuple(averages_in(trainer.callbacks)))  # type: ignore[attr-defined]
        if self._mesh.num_stages > 1:
            # The summary and the loggers would run the whole model with the example.
            self._until_teardown.callback(setattr, module, "example_input_array", module.example_input_array)
            module.example_input_array = None
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        training = trainer.state.fn == TrainerFn.FITTING
        self.progress.forget()
        hooks = UserHooks.of(
            module, forward_context=self.precision_plugin.forward_context, model_name=name_in_steps(module)
        )
        self.session.start(hooks, self.root_device, training)
        if training:
            rank_zero_info(f"Pipeline: {self.session.describe()}")
        self._batch_ends = BatchEnds(module, self.session, trainer)
        self._pipeline_callback = PipelineCallback(trainer, self.session, self.step_log, self._drain, self._batch_ends)
        self._pipeline_callback.install(trainer)
        self.step_log.connect(trainer, module)
        self.take_batch_hooks([module, trainer.datamodule], self._until_teardown)  # type: ignore[attr-defined]
        if self._mesh.num_replicas == 1:
            private.shuffle_only(trainer, shuffles)
        if training:
            private.run_validations_in(trainer, self.progress.validating)
            if self._mesh.num_stages > 1:
                show_stages(trainer)
            self.setup_optimizers(trainer)
            self._attach_optimizer()
        self.setup_precision_plugin()

    def _structure_problems(self, trainer: L.Trainer) -> list[str]:
        """Return the reasons why the module cannot be cut."""
        module, resolved = self._module, self.session.resolved
        assert resolved is not None
        return module_problems(module) or problems_of_layers(
            self._network(), module.example_input_array, name_in_steps(module), resolved.num_stages
        )

    @override
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """Make the optimizer of the whole model; an error on one rank is raised on all."""
        error: Exception | None = None
        assert self.session.stage is not None
        try:
            with self.session.stage.whole_model():
                super().setup_optimizers(trainer)
            if problem := optimizer_problem(self.optimizers):
                error = ConfigurationError(problem)
        except Exception as caught:
            # With several optimizers Lightning advises manual optimization, which a pipeline refuses, too.
            error = ConfigurationError(ONE_OPTIMIZER) if "multiple optimizers" in str(caught) else caught
        agree_on_error(self._mesh, error)

    def _attach_optimizer(self) -> None:
        optimizer = self.optimizers[0]
        self.session.attach(optimizer, self._step_optimizer)
        self._hyper_parameters = self.session.stage_optimizer.hyper_parameters
        expect_early_schedulers()
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        self.precision_plugin.clip_grad_by_value = self._clip_grad_by_value  # type: ignore[method-assign]

    def _network(self) -> Module:
        network = network_in(self._module)
        assert network is not None
        return network

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # -- training -------------------------------------------------------------------------------------------------

    @property
    def batch_weight(self) -> float | None:
        """Sum of the microbatches' weights in the newest batch; None unless this is the last stage."""
        return self.step_log.batch_weight if self._mesh.is_last else None

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self.progress.start_training(self._module.trainer)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device with the module's hooks; a middle stage's placeholder for a batch is not moved."""
        engine = self.session.engine
        if engine is not None and not (engine.mesh.is_first or engine.mesh.is_last) and has_placeholder(batch):
            return batch
        moved = super().batch_to_device(batch, device, dataloader_idx)
        if moved is not batch and self._only_moves_batches and engine is not None:
            engine.host_batch.moved(batch, moved)
        return moved

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the batch. Only the last stage knows the loss; the other stages return a stand-in for it."""
        engine, module, batch_ends = self._running(), self._module, self._batch_ends
        assert batch_ends is not None
        if private.begins_accumulation(module.trainer):
            engine.drop()  # zero_grad() would also drop an earlier closure's gradient that no step has used
        after_update = batch_ends.call_late if batch_ends.kinds else lambda: None
        output = engine.run(args[0], self._user_step("training_step", args, kwargs), after_update)
        mesh = engine.mesh
        returned: dict[str, Any] = {"loss": NO_LOSS}
        if mesh.is_last:
            self.step_log.log_batch(output.weight)
            loss = output.mean_loss(engine.runner.hooks.loss_reduction)
            returned = {**output.extras(), "loss": or_nan(loss, self.root_device)}
        # Until the closure ends, hooks draw random numbers from a seed of this stage, as the hooks of updates do.
        seed = engine.runner.seed
        self._draws = drawing_from(seed, self.root_device, "closure", mesh.stage, engine.next_forward)
        self._draws.__enter__()
        return returned

    @override
    def backward(self, closure_loss: Any, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        """Call the hooks around the backward; the engine has already run the backwards themselves."""
        loss = None if closure_loss is NO_LOSS else closure_loss
        self.precision_plugin.pre_backward(loss, self._module)  # type: ignore[arg-type]
        closure_loss = self.precision_plugin.post_backward(closure_loss, self._module)
        if self._draws is not None:
            self._draws.__exit__()
            self._draws = None
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the batch, and apply the updates that are due by its end."""
        result, engine = closure(), self._running()
        if not engine.accumulating:
            raise ConfigurationError(NOTHING_TO_STEP)
        assert self._batch_ends is not None
        engine.complete(self._hyper_parameters(), private.state_at_update(self._module))
        updates = engine.apply_due()
        if self._batch_ends.waiting:
            self._batch_ends.call_late()
        self._receive(updates)
        return result

    def _running(self) -> Engine:
        """Return the engine; raise if the run has failed."""
        session = self.session
        return session.running() if session.engine is None or session.watch.failure is not None else session.engine

    def drain(self) -> None:
        """Finish all microbatches in flight and apply every update; a collective call.

        This costs time, but does not change what is trained.

        Raises:
            ConfigurationError: a hook that waited for the update of its batch runs in the middle of the next batch.
            RuntimeError: an update is being applied.
        """
        self._drain()
        self.step_log.share_metrics()

    def _drain(self) -> None:
        self.session.watch.check()
        if self.session.engine is not None and self.session.optimizer is not None and self._batch_ends is not None:
            self._batch_ends.check_drain()
            updates = self.session.drain()
            self._batch_ends.call_late()
            self._receive(updates)

    def _receive(self, updates: Sequence[Update]) -> None:
        for update in updates:
            self.gradient_norm = update.totals.norm
            if not update.totals.finite:
                rank_zero_warn(f"mini-batch {update.mini_batch}: its gradient holds NaN or Inf; the update was skipped")
        self.step_log.receive(updates)

    def _step_optimizer(self, step: StepInput) -> None:
        """Step the optimizer and call the user's hooks, with the step count and clipping of the gradient's batch."""
        self._running()
        with private.at_update(self._module.trainer, step.note):
            self.precision_plugin.optimizer_step(self.optimizers[0], model=self._module, closure=lambda: None)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self.session.clip(float(clip_val))

    def _clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_values(self.precision_plugin.main_params(optimizer), float(clip_val))

    def _user_step(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Callable[[Any, float | None], Any]:
        function = getattr(self._module, name)
        return self.step_log.recording(lambda microbatch: function(microbatch, *args[1:], **kwargs))

    # -- the end --------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._started_others:
            return  # this process is not a rank, and the next launch starts new ranks
        # After a preemption all ranks end together.
        if self._pipeline_callback is None or not self._pipeline_callback.preemption.ended:
            self.session.watch.fail(exception)
            self.session.watch.set_deadline()

    @override
    def teardown(self) -> None:
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(self.precision_plugin).pop(name, None)
        self.step_log.disconnect()
        if self._batch_ends is not None:
            self._batch_ends.release()
        self._until_teardown.close()
        try:
            try:
                self.checkpoints.close()
            finally:
                self.session.teardown()
            with suppress(NotImplementedError):  # a refused network is still on the meta device
                super().teardown()  # moves the module to the host
            if self.session.engine is not None and self.session.watch.failure is None:
                self.session.engine.weights.to_host()
        finally:
            self.session.watch.cancel_deadline()


class _NoLoss:
    """Stand-in for the loss on stages that do not know it; Lightning's closure turns it into None."""

    def __truediv__(self, _: int) -> _NoLoss:
        return self

    def detach(self) -> _NoLoss:
        """Return itself."""
        return self

    def clone(self) -> None:
        """Return None, which Lightning takes for a missing loss."""


NO_LOSS = _NoLoss()

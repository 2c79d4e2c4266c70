"""Fabric's ``delayed_gradient`` strategy: a hand-written loop with the gradients of an asynchronous pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_asyncpp.auxiliary import StatisticsLayer
from lightning_asyncpp.core.batches.batch_output import or_nan
from lightning_asyncpp.core.batches.micro_batch import checked_weight
from lightning_asyncpp.core.batches.tree import merge_outputs
from lightning_asyncpp.core.batches.user_hooks import UserHooks
from lightning_asyncpp.core.cut.partition_choice import Example, example_of
from lightning_asyncpp.core.emulator.delay_emulator import DelayEmulator
from lightning_asyncpp.core.updates.clipping import check_norm_type
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.fabric import delayed_refusals as refusals
from lightning_asyncpp.fabric.arguments import DelayArguments, FabricsDDPArguments
from lightning_asyncpp.fabric.delayed_checkpoint import DelayedCheckpoints
from lightning_asyncpp.fabric.loader import resumable
from lightning_asyncpp.fabric.private import backward_allowed, drop_backward_sync_control
from lightning_asyncpp.strategy_parts.arguments import check_arguments, for_ddp, takes
from lightning_asyncpp.strategy_parts.delayed_mixin import DelayedStrategyMixin


class DelayedGradientStrategy(DelayedCheckpoints, DelayedStrategyMixin, DDPStrategy):
    """Emulates the gradient delay of asynchronous pipelines, on one device or under DDP, for any model.

    An ordinary Fabric loop stays as it is::

        model, optimizer = fabric.setup(model, optimizer)
        for batch in loader:
            loss = loss_of(model, batch)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()

    From the first forward in training mode up to ``optimizer.step()`` the parameters hold the older weights, at which
    the gradient is taken; the step changes the newest. Evaluation (``model.eval()`` or ``torch.no_grad()``) and
    checkpoints see the newest. With ``micro_batches`` the loop is that of the pipeline strategies:
    ``strategy.training_step(step_fn, batch)`` in place of forward and backward; it then computes bitwise what
    they compute.

    Arguments: :class:`~lightning_asyncpp.fabric.arguments.DelayArguments`.

    Raises:
        ConfigurationError: the arguments do not fit together, all of them at once.
    """

    settings: DelayArguments

    @takes(DelayArguments)
    def __init__(self, arguments: DelayArguments) -> None:
        super().__init__(
            **for_ddp(FabricsDDPArguments, arguments), find_unused_parameters=arguments.find_unused_parameters
        )
        check_arguments(arguments, arguments)
        self.settings = arguments
        self.emulator: DelayEmulator | None = None
        self._module: Module | None = None
        self._in_step = False
        self._resumed = False
        self._loaded_state: dict[str, Any] | None = None
        self._awaits_backward = False

    # -- set-up ---------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        if self._alone:
            super(ParallelStrategy, self).setup_environment()
        else:
            super().setup_environment()

    @property
    @override
    def distributed_sampler_kwargs(self) -> Any:
        # In a single process samplers stay as they are; with micro_batches the order is that of a pipeline's data.
        return None if self._alone and self.settings.micro_batches is None else super().distributed_sampler_kwargs

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        return resumable(super().process_dataloader(dataloader), dataloader)

    @override
    def setup_module(self, module: Module) -> Module:  # type: ignore[override]
        """Take the model.

        Raises:
            ConfigurationError: there is one already, or it needs ``micro_batches``.
        """
        if self._module is not None:
            raise ConfigurationError(refusals.SECOND_MODULE)
        if self.settings.micro_batches is None and any(isinstance(m, StatisticsLayer) for m in module.modules()):
            raise ConfigurationError(refusals.COUNTS_WITHOUT_MICRO_BATCHES)
        self._cut_as_a_pipeline(module, self.settings.example_for(module), "the model")
        self._module = module
        # Traced by torch.compile, the exchange of weights would not happen.
        module.register_forward_pre_hook(torch.compiler.disable(self._before_forward))
        if not self._alone and self.settings.micro_batches is None:
            return super().setup_module(module)
        drop_backward_sync_control(self)
        if not self._alone:
            self._share_weights(module)
        return module

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Take the optimizer and begin to keep older weights.

        Raises:
            ConfigurationError: there is one already, or no model yet.
        """
        if self._module is None or self.emulator is not None:
            raise ConfigurationError(refusals.NO_MODULE if self._module is None else refusals.SECOND_OPTIMIZER)
        hooks = UserHooks.of(self._module, self.settings.hooks)
        micro_batches = self._micro_batch_gradient(self._module, self._module, hooks)
        partition = self._partition(self._module, self._example())
        # What was loaded before this counts: an optimizer that is told another delay forgets.
        self.emulator = DelayEmulator(
            self.settings, self._module, optimizer, micro_batches, self._loaded_state, partition
        )
        return optimizer

    def _example(self) -> Example | None:
        parts, model = self.settings.micro_batches, self._module
        if model is None or parts is None:
            return None
        return example_of(self.settings.example_for(model), parts, self.precision, self.root_device)

    def _before_forward(self, module: Module, _: Any) -> None:
        if self.emulator is None or self._in_step:
            return
        weights = self.emulator.weights
        if module.training and torch.is_grad_enabled():
            weights.go_back()
            self._awaits_backward = True
        elif weights.is_stale:
            if self._awaits_backward:
                raise ConfigurationError(refusals.FORWARD_BEFORE_BACKWARD)
            weights.come_forward()

    # -- an ordinary loop -----------------------------------------------------------------------------------------

    @override
    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward on the weights of the forward.

        Raises:
            ConfigurationError: the parameters hold other weights by now.
        """
        if self.emulator is not None:
            if self.emulator.micro_batches is not None:
                raise ConfigurationError(refusals.BACKWARD)
            if self.emulator.weights.keeps_older and not self.emulator.weights.is_stale:
                raise ConfigurationError(refusals.LATE_BACKWARD)
        super().backward(tensor, module, *args, **kwargs)
        self._awaits_backward = False

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Apply the gradient to the newest weights.

        Raises:
            NonFiniteGradientError: under ``nonfinite_gradients="stop"``.
        """
        emulator = self._running("optimizer.step()")
        self._resumed = False  # what is loaded from here on is no other part of the checkpoint that the run came from
        closure = kwargs.pop("closure", None)
        if closure is not None and self.settings.is_plain:
            closure = self._checked(closure, self.precision)
            result = self.precision.optimizer_step(optimizer, closure=closure, **kwargs)
            emulator.mini_batch += 1
            return result
        if emulator.micro_batches is not None and not emulator.micro_batches.pending:
            raise ConfigurationError(refusals.NOTHING_TO_STEP)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        def step() -> None:
            given = {} if closure is None else {"closure": lambda: loss}
            self.precision.optimizer_step(optimizer, **given, **kwargs)

        self._update(step, self.precision)
        self._awaits_backward = False
        return loss

    # -- a loop of the pipeline strategies ------------------------------------------------------------------------

    def training_step(self, step_fn: Callable[[Any], Any], batch: Any) -> Tensor:
        """Run a training batch forward and backward, cut into micro-batches; needs ``micro_batches``.

        Several calls before one ``optimizer.step()`` accumulate their gradients.

        Args:
            step_fn: micro-batch -> loss, or a dictionary with it under ``"loss"``.
            batch: the batch; it is cut into micro-batches along the first dimension.

        Returns:
            The mean loss of this process's batch, detached.

        Raises:
            ConfigurationError: no ``micro_batches`` were given, or the step cannot be run so.
        """
        emulator = self._running("strategy.training_step")
        micro_batches = emulator.micro_batches
        if micro_batches is None:
            raise ConfigurationError(refusals.NO_MICRO_BATCHES)
        self._in_step = True
        try:
            with emulator.weights.stale(), backward_allowed(True):
                output = micro_batches.run(batch, lambda micro_batch, weight: step_fn(micro_batch))
                micro_batches.restore()
        finally:
            self._in_step = False
        return or_nan(output.mean_loss(micro_batches.hooks.loss_reduction), self.root_device)

    def evaluation_step(self, step_fn: Callable[[Any], Any], batch: Any) -> Any:
        """Run a batch forward on the newest weights, without gradients, cut into micro-batches.

        Returns:
            What ``step_fn`` would have returned for the whole batch; see
            :meth:`lightning_asyncpp.fabric.AsyncPipelineStrategy.evaluation_step`.
        """
        emulator = self._running("strategy.evaluation_step")
        if (micro_batches := emulator.micro_batches) is None:
            raise ConfigurationError(refusals.NO_MICRO_BATCHES)
        emulator.check_no_update()
        emulator.weights.come_forward()
        hooks = micro_batches.hooks
        slots = [slot for slot in hooks.split_batch(batch, micro_batches.count) if slot is not None]
        with torch.no_grad():
            results = [step_fn(slot) for slot in slots]
        return merge_outputs(results, [checked_weight(hooks.micro_batch_weight(slot)) for slot in slots])

    @property
    def layer_metrics(self) -> dict[str, float]:
        """Numbers for the logger of what layers counted (:class:`StatisticsLayer`), from the newest update."""
        return {} if self.emulator is None else self.emulator.counts.metrics

    def flush(self) -> None:
        """Do nothing: no update is outstanding after ``optimizer.step()``."""

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradient of the next update; with ``micro_batches`` in the arithmetic of a pipeline."""
        emulator = self._running("fabric.clip_gradients()")
        if emulator.micro_batches is None:
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        check_norm_type(float(norm_type))
        return emulator.clip(float(max_norm))

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float | int) -> None:
        """Clip every element of the gradient of the next update."""
        if (micro_batches := self._running("fabric.clip_gradients()").micro_batches) is not None:
            micro_batches.complete()
        super().clip_gradients_value(module, optimizer, clip_val)

    def _running(self, caller: str) -> DelayEmulator:
        if self.emulator is None:
            raise ConfigurationError(refusals.not_set_up(caller))
        return self.emulator

"""Base class of the Fabric strategies, for a hand-written training loop over pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import wrappers
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_asyncpp.adapt import problems_of_layers
from lightning_asyncpp.core.clipping import clip_values
from lightning_asyncpp.core.cut.network import called_by_steps
from lightning_asyncpp.core.cut.partition_choice import example_of
from lightning_asyncpp.core.cut.units import has_layers
from lightning_asyncpp.core.engine import Engine
from lightning_asyncpp.core.microbatch import UserHooks, or_nan
from lightning_asyncpp.core.ranks.agreement import agree_on_problems
from lightning_asyncpp.core.trace import Activity, Wait
from lightning_asyncpp.core.tree import merge_outputs
from lightning_asyncpp.core.updates.update import StepInput, Update
from lightning_asyncpp.dependencies import required
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.fabric.calls import ONE_MODEL_ONE_OPTIMIZER, module_problems, not_set_up, refuse_outside_of_steps
from lightning_asyncpp.fabric.checkpoint import PipelineCheckpoints, resumable
from lightning_asyncpp.strategy_parts.mixin import expect_early_schedulers
from lightning_asyncpp.strategy_parts.recording import Recorder
from lightning_asyncpp.strategy_parts.stage_loader import stage_loader

StepFunction = Callable[[Any], Any]


class PipelineStrategy(PipelineCheckpoints):
    """Base class of the Fabric strategies, derived from Lightning's ``DDPStrategy``.

    The engine, the weight versions and the schedule are in :mod:`lightning_asyncpp.core`; this class connects them
    to Fabric's calls. Processes and the process group are started as for DDP. The model may have the attributes with
    which a LightningModule describes its batches: ``split_batch``, ``microbatch_weight``, ``loss_reduction``,
    ``example_input_array``.

    Arguments as for :class:`PipelineStrategyMixin`.

    Attributes:
        gradient_norm: 2-norm of the newest update's gradient over all stages, before clipping; ``None`` before the
            first update.
        layer_metrics: statistics of layers (:class:`StatisticsLayer`) of the newest update, for the logger; the same on
            all ranks.
    """

    @override
    def _init_state(self) -> None:
        self.gradient_norm: float | None = None
        self.layer_metrics: dict[str, float] = {}
        self._hooks = UserHooks()
        self._clipping: tuple[str, float] | None = None  # argument of fabric.clip_gradients and its value
        self._recorder: Recorder | None = None
        self._backward_sync_control = None  # replicas are reduced once per update: fabric.no_backward_sync does nothing

    # -- set-up ---------------------------------------------------------------------------------------------------

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Build on the meta device if ``empty_init``, else on the CPU; this rank's stage moves to its device later."""
        stack = ExitStack()
        stack.enter_context(torch.device("meta" if empty_init else "cpu"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    @override
    def module_to_device(self, module: Module) -> None:
        """Move a module to the device, except for the pipeline's model, which is moved after it has been cut."""
        on_meta = any(p.is_meta for p in module.parameters())
        to_be_cut = has_layers(module) or any(p.requires_grad for p in module.parameters())
        if not on_meta and not (to_be_cut and self.session.stage is None):
            super().module_to_device(module)

    @override
    def setup_module(self, module: Module) -> Module:  # type: ignore[override]
        """Cut the model to this rank's stage and initialise what is on the meta device; a collective call.

        Raises:
            ConfigurationError: the model cannot be cut or trained; raised on every rank, with all problems.
        """
        # Fabric sets no precision context around the user's step. Its wrapper of the model sets one, and converts the
        # output.
        self._hooks = UserHooks.of(
            module, forward_context=self.precision.forward_context, context_around_step=False, model_name="model"
        )
        precision = str(self.precision.precision)
        problems = module_problems(self.session, module, precision, self._hooks.loss_reduction)
        is_cut = self._is_cut(module)
        if not problems and is_cut:
            problems = problems_of_layers(
                module, getattr(module, "example_input_array", None), "the model", self._mesh.num_stages
            )
        with self.session.watch.collective():
            agree_on_problems(self._mesh, problems)
            assert self.session.resolved is not None
            parts, given = self.session.resolved.microbatches, getattr(module, "example_input_array", None)
            example = example_of(given, parts, self.precision, self.root_device)
            self._cut(module, None if is_cut else module, example=example)
            module.to(self.root_device)
            self.session.start(self._hooks, self.root_device, training=False)
            if self.session.whole_model.pruned.places:
                called_by_steps(module).register_forward_pre_hook(refuse_outside_of_steps)
            self.session.whole_model.pruned.show(True)  # so that the user can make the optimizer from all parameters
        return module

    def _is_cut(self, module: Module) -> bool:
        """Return whether a model is cut between its layers."""
        return True

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Reduce the optimizer to this stage and allocate the second weight version; a collective call.

        Raises:
            ConfigurationError: the model or optimizer cannot be used, or differs between ranks; raised on every rank.
        """
        if self.session.stage is None or self.session.optimizer is not None:
            raise ConfigurationError(ONE_MODEL_ONE_OPTIMIZER)
        self.session.whole_model.pruned.show(False)
        with self.session.watch.collective():
            self.session.close()
            self.session.start(self._hooks, self.root_device, training=True)
            rank_zero_info(f"Pipeline: {self.session.describe()}")
            self.session.attach(optimizer, self._step_optimizer)
        expect_early_schedulers()
        optimizer.__class__ = _with_zero_grad(type(optimizer), self._drop)
        return optimizer

    # -- collectives ----------------------------------------------------------------------------------------------

    @override
    def all_reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Tensor:
        self.session.watch.check()
        with self.session.watch.collective():
            return super().all_reduce(tensor, group, reduce_op)

    # -- data -----------------------------------------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self._mesh.num_replicas, "rank": self._mesh.replica}

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader of the replica's batches; middle stages read no data if the loader's length is reliable."""
        mesh = self._mesh
        loader = stage_loader(dataloader, mesh.num_replicas, mesh.replica, mesh.is_first or mesh.is_last)
        return resumable(loader, dataloader)

    # -- training -------------------------------------------------------------------------------------------------

    def training_step(self, step_fn: StepFunction, batch: Any) -> Tensor | None:
        """Run a training batch: its forwards, and the backwards that are due by the schedule.

        Several calls before one ``optimizer.step()`` accumulate their gradients.

        Args:
            step_fn: function of a microbatch that calls the model once and returns the loss, or a dictionary with it
                under ``"loss"``.
            batch: the batch, which is cut into microbatches along the first dimension. Middle stages ignore it.

        Returns:
            On ranks of the last stage (rank 0 is one), the mean loss of the replica's batch, detached; ``None`` on
            other ranks.

        Raises:
            ConfigurationError: a pipeline cannot run the step; raised at the first call, on every rank.
        """
        engine = self._trained_engine("strategy.training_step")
        if self._recorder is not None:
            self._recorder.begin_batch()
        with self._driving():
            output = engine.run(batch, lambda microbatch, _: step_fn(microbatch))
        if not engine.mesh.is_last:
            return None
        return or_nan(output.mean_loss(self._hooks.loss_reduction), self.root_device)

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Complete a mini-batch (all batches since the last step) with present hyper-parameters; apply updates now due.

        A closure is called before, and may call :meth:`training_step`.

        Raises:
            ConfigurationError: no optimizer was set up.
            NonFiniteGradientError: a gradient is not finite under ``nonfinite_gradients="stop"``; raised on every rank.
        """
        self._trained_engine("optimizer.step()")
        result = None if closure is None else closure()
        with self._driving():
            clipping, self._clipping = self._clipping, None
            self._applied(self.session.complete(note=clipping))
        if self._recorder is not None:
            self._recorder.end_batch()
        return result

    def _drop(self) -> None:
        """Drop the gradient of the batches since the last step."""
        self._trained_engine("optimizer.zero_grad()").drop()
        self._clipping = None

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Any:
        """Clip this mini-batch's gradient to ``max_norm``, by a 2-norm over all stages, when its update is applied.

        Stages that step before they know the norm clip by the larger one of two: see :func:`.larger`.

        Returns:
            ``None``, since the norm is only known one mini-batch later; see ``gradient_norm``.
        """
        if norm_type != 2:
            raise ConfigurationError(
                f"norm_type={norm_type}: pipeline stages clip gradients by their 2-norm only; leave norm_type out"
            )
        self._clip("max_norm", float(max_norm))

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float | int) -> None:
        """Clip every element of the gradient of this mini-batch, when its update is applied."""
        self._clip("clip_val", float(clip_val))

    def _clip(self, name: str, limit: float) -> None:
        if self._clipping is not None and self._clipping[0] != name:
            raise ConfigurationError(
                f"clip_gradients was called with {self._clipping[0]} and with {name} for the same update,"
                " but the norm over all stages is computed before any clipping; use only one of them"
            )
        self._clipping = name, limit

    def drain(self) -> None:
        """Finish all microbatches in flight and apply every update; a collective call.

        This costs time, but does not change what is trained. Batches after the last ``optimizer.step()`` have no
        update yet.
        """
        self._drain()
        if self._recorder is not None:
            self._recorder.write()

    def _step_optimizer(self, step: StepInput) -> None:
        self.session.watch.check()
        optimizer = self.session.optimizer
        assert optimizer is not None
        if step.note is not None:
            name, limit = step.note
            if name == "max_norm":
                self.session.clip(limit)
            else:
                clip_values(self.session.running().weights.parameters.values(), limit)
        self.precision.optimizer_step(optimizer)

    def _applied(self, updates: list[Update]) -> None:
        for update in updates:
            self.gradient_norm = update.totals.norm
            if update.totals.weight:
                self.layer_metrics = self.session.whole_model.statistics.metrics(update.totals.statistics)

    def _drain(self) -> None:
        """Drain between two mini-batches."""
        self.session.running()
        self.session.check_drain()
        with self._driving():
            self._applied(self.session.drain())

    def _trained_engine(self, caller: str) -> Engine:
        if self.session.optimizer is None:
            raise ConfigurationError(not_set_up(caller))
        return self.session.running()

    @contextmanager
    def _driving(self) -> Iterator[None]:
        """Allow the engine's backward passes; report errors to the failure watch, so that other ranks do not wait."""
        try:
            with backward_allowed():
                yield
        except BaseException as error:
            self.session.watch.fail(error)
            raise

    # -- evaluation -----------------------------------------------------------------------------------------------

    def evaluation_step(self, step_fn: StepFunction, batch: Any) -> Any:
        """Drain (apply all outstanding updates), then run a batch forward without gradients; a collective call.

        The model keeps its mode: call ``model.eval()`` before an evaluation and ``model.train()`` after it.

        Args:
            step_fn: function of a microbatch that calls the model once.
            batch: the batch; middle stages ignore it.

        Returns:
            On the last stage the result of ``step_fn`` for the whole batch: tensors of the microbatches are joined
            along the first dimension, and tensors without dimensions are averaged with the microbatches' weights.
            ``None`` on other stages.
        """
        engine = self.session.running()
        if not engine.drained:
            self._drain()
        if self._recorder is not None:
            self._recorder.begin_pause(Activity.EVALUATE)
        with self._driving(), torch.no_grad():
            output = engine.evaluate(batch, lambda microbatch, _: step_fn(microbatch))
        if self._recorder is not None:
            self._recorder.begin_pause(Wait.DATA)
        return merge_outputs(output.results, output.weights) if self._mesh.is_last else None

    # -- recording ------------------------------------------------------------------------------------------------

    def record_trace(self, dirpath: str | Path, first_mini_batch: int = 0, mini_batches: int | None = None) -> Recorder:
        """Record the timeline of every stage from here on, for ``asyncpp trace``; a collective call.

        The time between ``optimizer.step()`` and the next ``training_step`` counts as waiting for data.

        Args:
            dirpath: folder of the files, one per process; if it has a recording already, ``<dirpath>-2``, ... is used.
            first_mini_batch: first mini-batch to record, counted over the run from 0.
            mini_batches: number of mini-batches to record; ``None``: all that follow.

        Returns:
            The recorder. It records until ``close()``, the end of its ``with`` block, or the end of the process.

        Raises:
            ConfigurationError: a rank cannot write to the folder; raised on every rank.
        """
        if self.session.optimizer is None:
            raise ConfigurationError(not_set_up("strategy.record_trace()"))
        self._end_recording()
        self._recorder = Recorder(self.session, Path(dirpath), first_mini_batch, mini_batches)
        return self._recorder

    def _end_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    # -- the end --------------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Ask all ranks to end soon; safe to call on any rank, at any time, and in a signal handler.

        Before ``setup_optimizers`` it does nothing.
        """
        if self.session.engine is not None:
            self.session.engine.updates.requested.interrupted = True

    @property
    def stop_agreed(self) -> bool:
        """Whether all ranks know that one of them asked to end.

        It becomes True on all ranks in the same ``optimizer.step()``, in one of the two mini-batches after
        :meth:`request_stop`.
        """
        return self.session.engine is not None and self.session.engine.updates.agreed.interrupted

    @override
    def teardown(self) -> None:
        self._end_recording()
        try:
            self.checkpoints.close()
        finally:
            self.session.teardown()
        super().teardown()


def _with_zero_grad(kind: type[Optimizer], drop: Callable[[], None]) -> type[Optimizer]:
    """Return a subclass with another ``zero_grad``; Fabric looks ``zero_grad`` up in the class, not in the object."""

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        drop()

    # The name marks the class as local. A second public class of the same name would make the command line refuse the
    # name as ambiguous.
    names = {
        "__module__": kind.__module__,
        "__qualname__": f"_with_zero_grad.<locals>.{kind.__name__}",
        "zero_grad": zero_grad,
    }
    return type(kind.__name__, (kind,), names)


@contextmanager
def backward_allowed() -> Iterator[None]:
    """Allow the engine's backward passes, which Fabric allows for wrapped models only in ``fabric.backward``.

    Raises:
        PrivateNameError: Fabric has no such private name any more.
    """
    before = required(wrappers, "_in_fabric_backward", "run backward passes")
    wrappers._in_fabric_backward = True
    try:
        yield
    finally:
        wrappers._in_fabric_backward = before

"""Session: a pipeline from set-up to its end, for the Trainer's and for Fabric's strategies."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_asyncpp.core.clipping import clip_by_norm
from lightning_asyncpp.core.cut.averages import Averages
from lightning_asyncpp.core.cut.cutting import cut
from lightning_asyncpp.core.cut.partition import Partition
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.cut.whole_model import WholeModel
from lightning_asyncpp.core.engine import Engine, StageEngine
from lightning_asyncpp.core.failure_watch import FailureWatch
from lightning_asyncpp.core.microbatch import UserHooks
from lightning_asyncpp.core.ranks.agreement import compare_ranks, copy_first_replica, in_same_call
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.settings import PipelineSettings, ResolvedSettings
from lightning_asyncpp.core.stage_optimizer import (
    AttachedOptimizer,
    OptimizerStep,
    StageOptimizer,
    in_words,
    name_parameters,
)
from lightning_asyncpp.core.updates.update import StepInput, Update
from lightning_asyncpp.errors import PeerLostError, ProtocolError


class PipelineSession:
    """Pipeline of a strategy.

    Args:
        settings: the user's settings.
        timeout: timeout of blocking communication; default: torch's.

    Attributes:
        started_with: name -> value of the strategy's arguments, which ranks compare when they connect.
        watch: handling of failures.
    """

    def __init__(self, settings: PipelineSettings, timeout: timedelta | None = None) -> None:
        self.settings, self.timeout = settings, timeout
        self.started_with = {name: repr(value) for name, value in vars(settings).items()}
        self.watch = FailureWatch()
        self.mesh: Mesh | None = None
        self.engine: Engine | None = None
        self.resolved: ResolvedSettings | None = None
        self.partition: Partition | None = None
        self.stage: Stage | None = None
        self.averages: Averages | None = None
        self.seed = 0
        self._stage_optimizer: StageOptimizer | None = None  # kept after training, to be saved
        self._trains = False
        self._attached: list[AttachedOptimizer] = []

    def connect(self, rank: int, world_size: int) -> Mesh:
        """Resolve the settings for the world size, and create the process groups; a collective call.

        Raises:
            ConfigurationError: the settings do not fit the world size, or differ between ranks; raised on every rank.
        """
        resolved = self.settings.resolved(world_size)
        if self.mesh is None or self.mesh.rank != rank or self.mesh.world_size != world_size:
            self.resolved = resolved
            self.mesh = Mesh(resolved.num_stages, resolved.data_parallel_size, rank)
            self.mesh.connect(self.timeout, agree=partial(compare_ranks, self.mesh, self.started_with))
        self.watch.start(self.mesh)
        return self.mesh

    def connected(self) -> Mesh:
        """Return the mesh of ranks, after :meth:`connect`."""
        assert self.mesh is not None, "the processes are not launched yet"
        return self.mesh

    def cut(
        self,
        model: nn.Module,
        seed: int,
        device: torch.device,
        partition: Partition,
        root: nn.Module | None = None,
        averages: Iterable[AveragedModel] = (),
    ) -> Stage:
        """Reduce ``model`` to this rank's stage and materialise its meta tensors on ``device``, unless this was done.

        Averages of the model, in ``root`` or in ``averages``, are cut, too.
        """
        mesh = self.connected()
        self.averages = Averages(model, root, averages)
        if self.stage is None or self.stage.model is not model:
            self.stage = cut(model, mesh.stage, mesh.num_stages, seed, device, root, partition.counts)
            self.partition = partition
        self.averages.cut(self.stage.whole.pruned)
        self.seed = seed
        return self.stage

    def start(self, hooks: UserHooks, device: torch.device, training: bool) -> Engine:
        """Create the engine, and copy replica 0's weights to the other replicas; a collective call.

        Args:
            hooks: user's hooks for microbatches and the loss.
            device: device of the stage.
            training: whether weights will be updated; without updates, one weight version is enough.
        """
        mesh, stage = self.connected(), self.stage
        assert stage is not None, "call cut() before start()"
        self.watch.start(mesh)
        stage.refresh()
        copy_first_replica(mesh, stage.state_dict)
        self._reset_run()
        resolved = self._run_settings(training).resolved(mesh.world_size)
        timeout = None if self.timeout is None else self.timeout.total_seconds()
        own = StageEngine(stage, mesh, resolved, self.seed, device, hooks, timeout)
        self.engine = Engine([own], mesh, own.runner, own.weights)
        self.watch.set_transport(self.engine.runner.transport, self.engine.ended_as_agreed)
        return self.engine

    def _reset_run(self) -> None:
        """Copy the model's weights into averages that are on the meta device, and reset the state of an earlier run."""
        if self.averages is not None:
            self.averages.fill()
        self._release_optimizer()
        self.watch.reset()
        self._trains = False

    def _run_settings(self, training: bool) -> PipelineSettings:
        """Return the settings of a run; without training there is no delay."""
        return self.settings if training else self.settings.with_delay(0)

    def running(self) -> Engine:
        """Return the engine.

        Raises:
            PeerLostError: another rank failed or is gone.
            RuntimeError: the pipeline was not started, or failed before.
        """
        self.watch.check()
        if self.engine is None:
            # Lightning's callbacks that save on an exception also get here. The error below would hide that exception,
            # so its text quotes the exception.
            error = sys.exc_info()[1]
            why = f": {type(error).__name__}: {error}" if error is not None else ""
            raise RuntimeError(f"the pipeline is not set up yet{why}")
        return self.engine

    def describe(self) -> str:
        """Return the resolved settings in one line."""
        engine = self.running()
        return f"{engine.mesh.describe()}, {engine.settings.describe(engine.schedules())}"

    def attach(self, optimizer: Optimizer, step: OptimizerStep) -> None:
        """Use an optimizer of the whole model for this stage's updates.

        Args:
            optimizer: optimizer of the whole model; see :meth:`Stage.whole_model`.
            step: function that clips the gradient of an update and steps the optimizer.

        Raises:
            ConfigurationError: parameters, optimizer or options differ between ranks.
        """
        engine, stage = self.running(), self.stage
        assert stage is not None
        self._release_optimizer()
        with stage.whole_model():
            names: dict[Tensor, str] = {p: name for name, p in stage.root.named_parameters()}
            name_parameters(optimizer, names)
            compare_ranks(self.connected(), in_words(optimizer, names))
        self._stage_optimizer = StageOptimizer(optimizer, stage.parameters.values(), stage.copies())
        self._trains = True
        self._attach_parts(engine, step)

    def _attach_parts(self, engine: Engine, step: OptimizerStep) -> None:
        """Attach the optimizer to the engine."""
        self.stage_optimizer.keep_own()
        self._attached = [AttachedOptimizer(self.stage_optimizer, engine.stages[0], step)]

    @property
    def optimizer(self) -> Optimizer | None:
        """Attached optimizer; None without one."""
        return self.stage_optimizer.optimizer if self._trains else None

    @property
    def stage_optimizer(self) -> StageOptimizer:
        """This stage's part of the attached optimizer."""
        assert self._stage_optimizer is not None, "attach() an optimizer first"
        return self._stage_optimizer

    @property
    def whole_model(self) -> WholeModel:
        """Description of the model before it was cut."""
        assert self.stage is not None, "call cut() first"
        return self.stage.whole

    def complete(self, note: Any = None) -> list[Update]:
        """Complete the mini-batch with the present hyper-parameters, and apply the updates that are due.

        Args:
            note: value that the strategy receives with this mini-batch's update.
        """
        engine = self.running()
        engine.complete(self.stage_optimizer.hyper_parameters(), note)
        return engine.apply_due()

    def check_drain(self) -> None:
        """Raise RuntimeError if an update is being applied, since :meth:`drain` would find the update incomplete."""
        if self._running_step is not None:
            raise RuntimeError(
                "weights cannot be gathered, saved, loaded or evaluated while an update is applied, as in a hook of the"
                " optimizer's step: do this in on_train_batch_end, or in a Fabric loop after optimizer.step()"
            )

    def drain(self) -> list[Update]:
        """Finish all microbatches in flight and apply all outstanding updates."""
        self.check_drain()
        return self.running().drain()

    def share_buffers(self) -> None:
        """Overwrite buffers with the first replica's, which checkpoints hold; a collective call, after a drain.

        Forwards of each replica change them from its own samples, as BatchNorm does.
        """
        copy_first_replica(self.connected(), self._buffers)

    def _buffers(self) -> dict[str, Any]:
        stage = self.stage
        assert stage is not None, "call cut() before share_buffers()"
        return {name: value for name, value in stage.state_dict().items() if name not in stage.parameters}

    def clip(self, max_norm: float) -> None:
        """Clip the gradients of the update being applied; see :mod:`lightning_asyncpp.core.clipping`.

        Raises:
            RuntimeError: no update is being applied, so there are no gradients.
        """
        if self._running_step is None:
            raise RuntimeError("gradients can be clipped only while an update is applied")
        for parameters, norm in self._running_step.clip_groups:
            clip_by_norm(parameters, norm, max_norm)

    def close(self) -> None:
        """End the run after all messages have arrived; a collective call unless the session failed.

        The engine is kept until the next :meth:`start`, so that weights and state can be gathered.
        """
        if self.engine is None:
            return
        try:
            if self.watch.failure is None and self.engine.runner.transport is not None:
                self.engine.runner.transport.settle()
                self.engine.runner.transport.announce_end_of_run()
                in_same_call(self.engine.mesh, "ends the run")
                self.engine.close()
        except (PeerLostError, ProtocolError) as error:
            self.watch.fail(error)
            raise
        finally:
            self._release_optimizer()
            self.engine.weights.release_masters()

    def _release_optimizer(self) -> None:
        for attached in self._attached:
            attached.release()
        self._attached = []

    def teardown(self) -> None:
        """End the run, and stop watching for failures; a collective call unless the session failed."""
        try:
            self.close()
        finally:
            self.watch.close()

    @property
    def _running_step(self) -> StepInput | None:
        """Input of the step that is running; None if there is none."""
        return next((a.running_step for a in self._attached if a.running_step is not None), None)

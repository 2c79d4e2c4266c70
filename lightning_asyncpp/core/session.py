"""A pipeline from set-up to the end, as both the Trainer's and Fabric's strategies use it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
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
from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.cut.whole_model import WholeModel
from lightning_asyncpp.core.engine import Engine
from lightning_asyncpp.core.failure_watch import FailureWatch
from lightning_asyncpp.core.microbatch import UserHooks
from lightning_asyncpp.core.ranks.agreement import (
    compare_ranks,
    copy_first_replica,
    finish_together,
)
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.settings import PipelineSettings, ResolvedSettings
from lightning_asyncpp.core.stage_optimizer import (
    AttachedOptimizer,
    OptimizerStep,
    StageOptimizer,
    in_words,
    name_parameters,
)
from lightning_asyncpp.core.updates.mini_batch import Update
from lightning_asyncpp.errors import PeerLostError, ProtocolError


class PipelineSession:
    """Everything that a strategy holds about its pipeline.

    Args:
        settings: the user's choices.
        timeout: of blocking communication; default: torch's.

    Attributes:
        started_with: what all ranks must share before they connect: the strategy's arguments, in words.
        watch: what is known of failures, and done about them.
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
        self._stage_optimizer: StageOptimizer | None = None  # stays after a training, to be saved
        self._trains = False
        self._attached: list[AttachedOptimizer] = []

    def connect(self, rank: int, world_size: int) -> Mesh:
        """Fit the settings to the world and make the process groups; a collective call.

        Raises:
            ConfigurationError: the settings do not fit; every rank finds the same.
        """
        resolved = self.settings.resolved(world_size)
        if self.mesh is None or self.mesh.rank != rank or self.mesh.world_size != world_size:
            self.resolved = resolved
            self.mesh = Mesh(resolved.num_stages, resolved.data_parallel_size, rank)
            self.mesh.connect(self.timeout, agree=partial(compare_ranks, self.mesh, self.started_with))
        self.watch.begin(self.mesh)
        return self.mesh

    def cut(
        self,
        model: nn.Module,
        seed: int,
        device: torch.device,
        root: nn.Module | None = None,
        partition: Partition | None = None,
        averages: Iterable[AveragedModel] = (),
    ) -> Stage:
        """Reduce ``model`` to this rank's stage, once; its meta tensors are materialised on ``device``.

        Without a partition all stages get the same number of layers. Averages of it, in ``root`` or given apart, are
        cut alike.
        """
        mesh = self._connected()
        self.averages = Averages(model, root, averages)
        if self.stage is None or self.stage.model is not model:
            partition = partition or choose_partition(model, mesh.stage, mesh.num_stages, "uniform")
            self.stage = cut(model, mesh.stage, mesh.num_stages, seed, device, root, partition.counts)
            self.partition = partition
        self.averages.cut(self.stage.whole.pruned)
        self.seed = seed
        return self.stage

    def start(self, hooks: UserHooks, device: torch.device, training: bool) -> Engine:
        """Make the engine; replicas start from replica 0's weights. A collective call.

        Args:
            hooks: the user's side.
            device: where the stage lives.
            training: whether weights will be updated; evaluation needs no second version.
        """
        mesh, stage = self._connected(), self.stage
        assert stage is not None, "cut() comes before start()"
        self.watch.begin(mesh)
        stage.refresh()
        copy_first_replica(mesh, stage.state_dict)
        resolved = self._begin(training).resolved(mesh.world_size)
        timeout = None if self.timeout is None else self.timeout.total_seconds()
        self.engine = Engine(stage, mesh, resolved, self.seed, device, hooks, timeout)
        self.watch.started(self.engine.runner.transport, self.engine.ended_as_agreed)
        return self.engine

    def _begin(self, training: bool) -> PipelineSettings:
        """Fill averages and forget what an earlier run left; return the settings of this one."""
        if self.averages is not None:
            self.averages.fill()
        self._release_optimizer()
        self.watch.failure, self._trains = None, False
        return self.settings if training else self.settings.with_delay(0)

    def running(self) -> Engine:
        """The engine.

        Raises:
            PeerLostError: another rank failed, or is gone.
            RuntimeError: the pipeline was not started, or failed before: nobody would answer.
        """
        self.watch.check()
        if self.engine is None:
            error = sys.exc_info()[1]  # which one of Lightning's callbacks that save on an exception would hide
            why = f": {type(error).__name__}: {error}" if error is not None else ""
            raise RuntimeError(f"the pipeline is not set up yet{why}")
        return self.engine

    def describe(self, clips: bool = False) -> str:
        """Return what was chosen, in one line of 80 columns; ``clips``: whether gradients are clipped by their norm."""
        engine = self.running()
        return f"{engine.mesh.describe()}, {engine.settings.describe(engine.schedules(), clips)}"

    def attach(self, optimizer: Optimizer, step: OptimizerStep) -> None:
        """Take this stage's part of an optimizer of the whole model.

        Args:
            optimizer: made from the whole model: see :meth:`Stage.whole_model`.
            step: clips the gradient of an update, and steps the optimizer.

        Raises:
            ConfigurationError: ranks have other parameters, another optimizer or other options.
        """
        engine, stage = self.running(), self.stage
        assert stage is not None
        self._release_optimizer()
        with stage.whole_model():
            names: dict[Tensor, str] = {p: name for name, p in stage.root.named_parameters()}
            name_parameters(optimizer, names)
            compare_ranks(self._connected(), in_words(optimizer, names))
        self._stage_optimizer = StageOptimizer(optimizer, stage.parameters.values(), stage.copies())
        self._trains = True
        self._attach_parts(engine, step)

    def _attach_parts(self, engine: Engine, step: OptimizerStep) -> None:
        """Have the updates of the engine step the optimizer."""
        self.stage_optimizer.keep_own()
        self._attached = [AttachedOptimizer(self.stage_optimizer, engine, step)]

    @property
    def optimizer(self) -> Optimizer | None:
        """The attached one."""
        return self.stage_optimizer.optimizer if self._trains else None

    @property
    def stage_optimizer(self) -> StageOptimizer:
        """This stage's part of it."""
        assert self._stage_optimizer is not None, "attach() an optimizer first"
        return self._stage_optimizer

    @property
    def whole_model(self) -> WholeModel:
        """Knowledge of the model from before it was cut."""
        assert self.stage is not None, "cut() comes first"
        return self.stage.whole

    def set_delay(self) -> None:
        """Tell the optimizer how old gradients are from the next mini-batch's update on, if it wants to know."""
        for attached in self._attached[:1]:  # of the oldest gradients
            attached.set_delay()

    def check_failure(self) -> None:
        """Raise what ended the run, if anything did: no collective can succeed any more."""
        self.watch.check()

    def close(self, note: Any = None) -> list[Update]:
        """End the mini-batch, with the hyper-parameters that are set now, and apply the updates whose time has come.

        Args:
            note: what the strategy wants to know at its update.
        """
        engine = self.running()
        engine.close(self.stage_optimizer.hyper_parameters(), note)
        return engine.apply_due()

    def check_drain(self) -> None:
        """Raise RuntimeError if an update is being applied: what drains would find a part of it."""
        if self._update is not None:
            raise RuntimeError(
                "weights cannot be gathered, saved, loaded or evaluated while an update is applied, in a hook of its"
                " step: do it in on_train_batch_end, or in a Fabric loop after optimizer.step()"
            )

    def drain(self, afterwards: Callable[[], None] = lambda: None) -> list[Update]:
        """Finish what is in flight and apply every outstanding update.

        Args:
            afterwards: called when they have been applied; it may still change weights.
        """
        self.check_drain()
        updates = self.running().drain()
        afterwards()
        return updates

    def clip(self, max_norm: float) -> None:
        """Clip the gradients of the update being applied: :mod:`lightning_asyncpp.core.clipping`.

        Raises:
            RuntimeError: no update is being applied; gradients exist only meanwhile.
        """
        if self._update is None:
            raise RuntimeError("gradients can be clipped only while an update is applied")
        clip_by_norm(self.running().weights.parameters.values(), self._update.message.norm, max_norm)

    def finish(self) -> None:
        """End the run, after every message has arrived; a collective unless the session failed.

        The engine stays until the next :meth:`start`, so that weights and state can be gathered afterwards.
        """
        if self.engine is None:
            return
        try:
            if self.watch.failure is None and self.engine.runner.transport is not None:
                self.engine.runner.transport.settle()
                self.engine.runner.transport.announce_end_of_run()
                finish_together(self.engine.mesh)
                self.engine.close_connections()
        except (PeerLostError, ProtocolError) as error:
            self.watch.fail(error)
            raise
        finally:
            self._release_optimizer()
            self.engine.release()

    def _release_optimizer(self) -> None:
        for attached in self._attached:
            attached.release()
        self._attached = []

    def leave(self) -> None:
        """Finish, and let nobody watch over this rank any longer; a collective unless the session failed."""
        try:
            self.finish()
        finally:
            self.watch.end()

    @property
    def _update(self) -> Update | None:
        """The update that is being applied."""
        return next((attached.update for attached in self._attached if attached.update is not None), None)

    def _connected(self) -> Mesh:
        assert self.mesh is not None, "connect() comes first"
        return self.mesh

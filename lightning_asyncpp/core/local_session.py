"""Session whose stages are all in this process and share one whole model."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_asyncpp.core.cut.averages import Averages
from lightning_asyncpp.core.cut.cutting import materialize
from lightning_asyncpp.core.cut.partition import Partition
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.cut.units import Unit, ownership_problems, pipeline_units
from lightning_asyncpp.core.cut.whole_model import WholeModel
from lightning_asyncpp.core.engine import Engine, StageEngine
from lightning_asyncpp.core.local import LocalPipeline
from lightning_asyncpp.core.microbatch import UserHooks
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.core.stage_optimizer import AttachedOptimizer, OptimizerStep
from lightning_asyncpp.core.updates.update import StepInput
from lightning_asyncpp.errors import ConfigurationError


class LocalSession(PipelineSession):
    """Session that runs P stages in this process; callers see one stage with the whole model.

    Args:
        settings: the user's settings.
        num_stages: number of stages P.
    """

    def __init__(self, settings: PipelineSettings, num_stages: int) -> None:
        super().__init__(settings)
        self.num_stages = num_stages
        self._stages: list[Stage] = []

    def connect(self, rank: int, world_size: int) -> Mesh:
        """Resolve the settings for the number of stages.

        Raises:
            ConfigurationError: the settings do not fit the number of stages, or there are several processes.
        """
        if world_size != 1:
            raise ConfigurationError(
                f"devices={world_size}: delayed_gradient runs all stages of a pipeline in one process; use devices=1,"
                " or strategy 'async_pipeline' to train on several devices"
            )
        self.resolved = self.settings.resolved(self.num_stages)
        self.mesh = self.mesh or Mesh(1, 1, 0)
        self.watch.reset()  # a failed run in one process leaves no rank waiting
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
        """Divide a model into P stages, and materialise its meta tensors; a model that is ``root`` is one layer.

        Raises:
            ConfigurationError: the model cannot be cut.
        """
        around = model if root is None else root
        is_cut = model is not root
        self.averages = Averages(model, root, averages)
        units = pipeline_units(model) if is_cut else [Unit("", model)]
        if problems := ownership_problems(around, units):
            raise ConfigurationError.from_problems(problems)
        whole = WholeModel.of(units, partition.counts, around)
        materialize(units, range(len(units)), seed, device, around)
        ends = list(accumulate(partition.counts))

        def stage(index: int, num_stages: int, own: list[Unit], first: int, whole: WholeModel) -> Stage:
            return Stage(model, index, num_stages, own, first, whole, around)

        self._stages = [
            stage(index, self.num_stages, units[end - count : end], end - count, whole)
            for index, (end, count) in enumerate(zip(ends, partition.counts))
        ]
        self.stage = stage(0, 1, units, 0, WholeModel.of(units, [len(units)], around))
        for part in (self.stage, *self._stages):
            part.runs_whole_step = not is_cut
        self.partition, self.seed = partition, seed
        return self.stage

    def start(self, hooks: UserHooks, device: torch.device, training: bool) -> Engine:
        """Create the engines; see :meth:`PipelineSession.start`."""
        assert self.stage is not None, "call cut() before start()"
        for stage in (self.stage, *self._stages):
            stage.refresh()
        self._reset_run()
        resolved = self._run_settings(training).resolved(self.num_stages)
        self.engine = LocalPipeline(self.stage, self._stages, resolved, self.seed, device, hooks)
        return self.engine

    def describe(self) -> str:
        """Return the resolved settings in one line; see :meth:`PipelineSession.describe`."""
        engine, many = self.running(), "s" if self.num_stages > 1 else ""
        return f"{self.num_stages} stage{many} here, {engine.settings.describe(engine.schedules())}"

    def _attach_parts(self, engine: Engine, step: OptimizerStep) -> None:
        """Attach each stage's part of the optimizer to its engine."""
        whole = self.stage_optimizer

        def attached(stage_engine: StageEngine) -> AttachedOptimizer:
            stage = stage_engine.stage
            others = [other for other in self._stages if other is not stage]
            own_step = _among_own(stage, others, step)
            return AttachedOptimizer(whole.for_stage(stage.parameters.values()), stage_engine, own_step)

        self._attached = [attached(stage_engine) for stage_engine in engine.stages]


def _among_own(stage: Stage, others: Iterable[Stage], step: OptimizerStep) -> OptimizerStep:
    """Return ``step`` with other stages' parameters hidden from its hooks, as in a process with one stage."""
    own, hidden = (
        {m: vars(m) for s in stages for unit in s.units for m in unit.module.modules()} for stages in ([stage], others)
    )
    of_others = [attributes for module, attributes in hidden.items() if module not in own]

    def among_own(given: StepInput) -> None:
        parameters = [attributes["_parameters"] for attributes in of_others]
        for attributes in of_others:
            attributes["_parameters"] = {}
        try:
            step(given)
        finally:
            for attributes, kept in zip(of_others, parameters):
                attributes["_parameters"] = kept

    return among_own

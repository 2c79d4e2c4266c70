"""Estimates of a recipe's memory and speed on a kind of device, and of its speed under other schedules."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.cut.units import Unit, pipeline_units
from lightning_asyncpp.core.cut.whole_model import WholeModel
from lightning_asyncpp.core.microbatch import UserHooks
from lightning_asyncpp.core.randomness import preserved_generators
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.schedule import Schedule, StalenessRule
from lightning_asyncpp.core.simulation import DeadlockError, Pace, pace_of
from lightning_asyncpp.core.tree import map_tensors, tensors_of
from lightning_asyncpp.core.wire.link import Header
from lightning_asyncpp.models.moe import Experts
from lightning_asyncpp.tools.plan.devices import HOP_SECONDS, Device
from lightning_asyncpp.tools.plan.fake_tensors import FAKE, Meter, as_on_gpu, empty_like, kernels_of_gpu
from lightning_asyncpp.tools.plan.profile import Memory, Profile, StageUnderTest, peak_of
from lightning_asyncpp.tools.plan.recipe import Recipe


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a forward, a backward, an update, a message to the next stage, and the reduction over replicas."""

    forward: float
    backward: float
    update: float
    transfer: float
    reduction: float


class Estimate:
    """Estimate of a recipe's pipeline on its devices.

    Args:
        recipe: recipe that is planned.
        device: kind of each device.

    Attributes:
        settings: settings of the pipeline.
        partition: numbers of layers of the stages, and the source of the choice.
        per_update: number of microbatches per update.
        profiles: profiles of the stages of one replica.

    Raises:
        ConfigurationError: the recipe cannot be run on this number of devices.
    """

    def __init__(self, recipe: Recipe, device: Device) -> None:
        self.recipe, self.device = recipe, device
        self.settings = recipe.settings.resolved(recipe.devices)
        self._units = pipeline_units(recipe.model)
        self.partition = choose_partition(recipe.model, 0, self.settings.num_stages, self.settings.partition)
        self._whole = WholeModel.of(self._units, self.partition.counts)
        hooks = UserHooks.of(recipe.module, forward_context=recipe.trainer.precision_plugin.forward_context)
        self._hooks = replace(hooks, microbatch_weight=lambda _: 1.0)
        self._microbatch = hooks.split_batch(recipe.batch, self.settings.microbatches)[0]  # the first is the largest
        self.per_update = self.settings.microbatches * recipe.trainer.accumulate_grad_batches
        with recipe.trainer.precision_plugin.forward_context():
            for module in recipe.model.modules():
                if isinstance(module, Experts):  # tries a kernel on real values; the result is cached
                    module.use_grouped(torch.device("cpu"))
        self.profiles = self._profiles()

    def units_of(self, stage: int) -> list[Unit]:
        """Return the layers of a stage."""
        first = sum(self.partition.counts[:stage])
        return list(self._units[first : first + self.partition.counts[stage]])

    # -- memory -------------------------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> list[Memory]:
        """Peak memory of each stage."""
        batch = sum(tensor.nbytes for tensor in tensors_of(self.recipe.batch))
        replicas, last = self.settings.data_parallel_size, self.settings.num_stages - 1
        return [
            peak_of(schedule, profile, self.per_update, batch if stage in (0, last) else 0, replicas)
            for stage, (schedule, profile) in enumerate(zip(self.schedules[self.own], self.profiles))
        ]

    def _profiles(self) -> list[Profile]:
        """Return the profiles of all stages; identical middle stages are profiled once."""
        tied = {stage for tie in self._whole.ties for stage in tie.stages}
        known: dict[str, Profile] = {}
        found: list[Profile] = []
        with preserved_generators(torch.device("cpu")), kernels_of_gpu() if self.device.is_gpu else nullcontext():
            for index in range(self.settings.num_stages):
                arriving = found[-1].sent if found else None
                is_unlike = index in tied or index in (0, self.settings.num_stages - 1)
                key = repr((index if is_unlike else described(self.units_of(index)), arriving))
                if key not in known:
                    known[key] = self._profile(index, arriving)
                found.append(known[key])
        return found

    def _profile(self, index: int, arriving: Header | None) -> Profile:
        module, own = self.recipe.module, self.units_of(index)
        first = sum(self.partition.counts[:index])
        model, num_stages = self.recipe.model, self.settings.num_stages
        stage = Stage(model, index, num_stages, own, first, self._whole, module)
        batch = map_tensors(empty_like, self._microbatch) if index in (0, num_stages - 1) else None
        rule, optimizer = self.schedules[self.own][index].stage_rule, self.recipe.optimizer_of(stage)
        if callable(set_delay := getattr(optimizer, "set_delay", None)):
            set_delay(rule.staleness(self.per_update))
        if self.device.is_gpu:
            as_on_gpu(optimizer)
        with FAKE, Meter((*module.parameters(), *module.buffers())) as meter:
            return StageUnderTest(
                stage, meter, rule.num_versions, self.settings.compute_dtype, batch, arriving, self._hooks,
                self.recipe.step(), optimizer,
            ).profile()  # fmt: skip

    # -- time ---------------------------------------------------------------------------------------------------------

    @property
    def own(self) -> str:
        """Name of the recipe's schedule."""
        names = {"least": "least staleness", "uniform": "2BW"}
        return names[self.settings.staleness] if self.settings.delay else "1F1B"

    @cached_property
    def schedules(self) -> dict[str, list[Schedule]]:
        """Name of a schedule -> the schedule of each stage, for the recipe's schedule and the schedules to compare."""
        own = [self._whole.schedule(self.settings, stage) for stage in range(self.settings.num_stages)]
        delayed = [replace(s, pipeline_rule=StalenessRule(1), slack=0) for s in own]
        return {
            "1F1B": [replace(s, pipeline_rule=StalenessRule(0), lookahead=0) for s in own],
            "least staleness": [replace(s, staleness="least") for s in delayed],
            "2BW": [replace(s, staleness="uniform") for s in delayed],
            self.own: own,
        }

    @cached_property
    def paces(self) -> dict[str, Pace]:
        """Name of a schedule -> its speed; schedules that would deadlock with so few microbatches are left out."""
        found = {}
        for name, schedules in self.schedules.items():
            with suppress(DeadlockError):
                found[name] = self._pace(schedules)
        return found

    def staleness(self, name: str) -> list[float]:
        """Return the delay, in updates, of each stage's gradients under a schedule."""
        return [schedule.stage_rule.staleness(self.per_update) for schedule in self.schedules[name]]

    @cached_property
    def times(self) -> list[StageTimes]:
        """Times of each stage's operations."""
        return [self._times(stage, profile) for stage, profile in enumerate(self.profiles)]

    def _times(self, stage: int, profile: Profile) -> StageTimes:
        device, replicas = self.device, self.settings.data_parallel_size
        mesh = Mesh(self.settings.num_stages, replicas, 0)
        transfer = reduction = 0.0
        if profile.sent is not None:  # the replica with the slowest link counts
            pairs = ([mesh.rank_of(stage, r), mesh.rank_of(stage + 1, r)] for r in range(replicas))
            transfer = profile.sent.num_bytes / min(device.bytes_per_second(pair) for pair in pairs)
        if replicas > 1:  # a ring: every device sends and receives each gradient nearly twice
            speed = device.bytes_per_second([mesh.rank_of(stage, r) for r in range(replicas)])
            reduction = 2 * (replicas - 1) * (HOP_SECONDS + profile.gradients / replicas / speed)
        forward, backward = (device.compute(part.flops) for part in (profile.forward, profile.backward))
        return StageTimes(
            forward, backward, device.update(profile.update.moved, profile.update.flops), transfer, reduction
        )

    def _pace(self, schedules: Sequence[Schedule]) -> Pace:
        times = self.times
        return pace_of(
            schedules, self.per_update, lambda stage, _: times[stage].forward,
            lambda stage, _: times[stage].backward, HOP_SECONDS, lambda stage, _: times[stage].update,
            lambda stage, _: times[stage].reduction, lambda stage: times[stage].transfer,
        )  # fmt: skip


def described(units: list[Unit]) -> list[Any]:
    """Return a description of units (layers); with equal inputs, units of equal descriptions need equal resources.

    It has the units' functions, the layers as printed, their modes, and their tensors' names, shapes and dtypes.
    """
    layers = nn.ModuleList(unit.module for unit in units)
    tensors = (*layers.named_parameters(), *layers.named_buffers())  # shared ones once
    return [
        [unit.function for unit in units],
        layers,
        [module.training for module in layers.modules()],
        [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors],
    ]

"""A recipe on a kind of device, answered: what every stage needs, and how fast its schedule and others would be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.schedule import Schedule, StalenessRule
from lightning_asyncpp.core.simulation import DeadlockError, Pace, pace_of
from lightning_asyncpp.tools.plan.devices import HOP_SECONDS, Device
from lightning_asyncpp.tools.plan.memory import Memory
from lightning_asyncpp.tools.plan.profile import Profile
from lightning_asyncpp.tools.plan.recipe import Recipe
from lightning_asyncpp.tools.plan.stages import Stages


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a forward, a backward, an update, a message to the next stage, and the reduction over replicas."""

    forward: float
    backward: float
    update: float
    transfer: float
    reduction: float


class Estimate:
    """A recipe's pipeline on its devices.

    Args:
        recipe: what is planned.
        device: each of them.

    Attributes:
        settings: of its pipeline.
        stages: of one replica.

    Raises:
        ConfigurationError: it cannot be run so.
    """

    def __init__(self, recipe: Recipe, device: Device) -> None:
        self.recipe, self.device = recipe, device
        self.settings = recipe.settings.resolved(recipe.devices)
        self.stages = Stages(recipe, self.settings, device.is_gpu)

    @cached_property
    def memory(self) -> list[Memory]:
        """Of each stage, when it needs most."""
        return self.stages.memory()

    @property
    def most(self) -> int:
        """Bytes of the stage that needs most."""
        return max(memory.total for memory in self.memory)

    @property
    def fits(self) -> bool:
        """Whether every stage fits its device."""
        return self.most <= self.device.room

    @property
    def samples(self) -> int:
        """Samples per update, over all replicas."""
        return self.recipe.batch_size * self.recipe.accumulated * self.settings.data_parallel_size

    @property
    def tokens(self) -> int | None:
        """Targets per update, of batches of token sequences (batch, time + 1); None of others."""
        batch = self.recipe.batch
        if not isinstance(batch, Tensor) or batch.ndim != 2 or batch.is_floating_point():
            return None
        return self.samples * (batch.shape[1] - 1)

    @property
    def num_parameters(self) -> int:
        """Of the whole model that are trained; what two stages hold counts once."""
        return sum(p.numel() for p in self.recipe.model.parameters() if p.requires_grad)

    @property
    def flops_per_sample(self) -> float:
        """Of a forward and its backward, recomputation included."""
        flops = sum(profile.forward.flops + profile.backward.flops for profile in self.stages.profiles)
        return flops * self.settings.micro_batches / self.recipe.batch_size

    # -- time ---------------------------------------------------------------------------------------------------------

    @property
    def own(self) -> str:
        """Name of the recipe's own schedule."""
        names = {"least": "least staleness", "uniform": "2BW"}
        return names[self.settings.staleness] if self.settings.delay else "1F1B"

    @cached_property
    def schedules(self) -> dict[str, list[Schedule]]:
        """The recipe's own schedule, and others: name -> schedule of each stage."""
        own = [self.stages.schedule(stage) for stage in range(self.settings.num_stages)]
        delayed = [replace(s, pipeline_rule=StalenessRule(1), slack=0) for s in own]
        return {
            "1F1B": [replace(s, pipeline_rule=StalenessRule(0), lookahead=0) for s in own],
            "least staleness": [replace(s, staleness="least") for s in delayed],
            "2BW": [replace(s, staleness="uniform") for s in delayed],
            self.own: own,
        }

    @cached_property
    def paces(self) -> dict[str, Pace]:
        """How fast each schedule is; those are left out for which there are too few microbatches."""
        found = {}
        for name, schedules in self.schedules.items():
            try:
                found[name] = self._pace(schedules)
            except DeadlockError:
                continue
        return found

    @property
    def step(self) -> float:
        """Seconds per update."""
        return self.paces[self.own].step

    def staleness(self, name: str) -> list[float]:
        """Return how many updates old the gradients of each stage are under a schedule."""
        return [schedule.stage_rule.staleness(self.stages.per_update) for schedule in self.schedules[name]]

    @cached_property
    def times(self) -> list[StageTimes]:
        """What each stage takes by itself."""
        return [self._times(stage, profile) for stage, profile in enumerate(self.stages.profiles)]

    def _times(self, stage: int, profile: Profile) -> StageTimes:
        device, replicas = self.device, self.settings.data_parallel_size
        mesh = Mesh(self.settings.num_stages, replicas, 0, placement=self.settings.placement)
        transfer = reduction = 0.0
        if profile.sent is not None:  # in the replica with the slowest link
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
            schedules, self.stages.per_update, lambda stage, _: times[stage].forward,
            lambda stage, _: times[stage].backward, HOP_SECONDS, lambda stage, _: times[stage].update,
            lambda stage, _: times[stage].reduction, lambda stage: times[stage].transfer,
        )  # fmt: skip

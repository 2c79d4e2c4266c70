"""A recipe on a number of devices, answered: what every stage needs, and how fast its schedule and others would be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.schedule import Schedule, StalenessRule
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.core.simulation import DeadlockError, Pace, pace_of
from lightning_asyncpp.tools.plan.devices import GIB, HOP_SECONDS, Device
from lightning_asyncpp.tools.plan.memory import Memory
from lightning_asyncpp.tools.plan.profile import Profile
from lightning_asyncpp.tools.plan.recipe import Recipe
from lightning_asyncpp.tools.plan.stages import Stages


@dataclass(frozen=True)
class Machine:
    """What a recipe is to run on."""

    device: Device
    mfu: float  # share of the peak that forwards and backwards reach, recomputation counted as work
    bandwidth_share: float  # share of the memory's peak bandwidth that the optimizer reaches
    per_node: int  # devices
    memory_gib: float  # of a device
    reserve_gib: float  # of that, what is left free

    @property
    def room(self) -> float:
        """Bytes that a stage may take."""
        return (self.memory_gib - self.reserve_gib) * GIB

    def compute(self, flops: float) -> float:
        """Return the seconds of a forward or a backward."""
        return flops / (self.device.tflops * 1e12 * self.mfu)

    def update(self, profile: Profile) -> float:
        """Return the seconds of an update: its bytes through memory, and what it multiplies (Newton-Schulz)."""
        moved = profile.update.moved / (self.device.bandwidth * 1e9 * self.bandwidth_share)
        return moved + self.compute(profile.update.flops)

    def bytes_per_second(self, ranks: Sequence[int]) -> float:
        """Return the speed of the slowest link between some ranks."""
        nodes = {rank // self.per_node for rank in ranks}
        return (self.device.link if len(nodes) == 1 else self.device.network) * 1e9

    def shared_by(self, devices: int, before: int) -> Machine:
        """Return the same for more devices, which have less each of this host's memory if they share it."""
        is_own = self.device.memory_gib > 0
        return self if is_own else replace(self, memory_gib=self.memory_gib * before / devices)


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a forward, a backward, an update, a message to the next stage, and the reduction over replicas."""

    forward: float
    backward: float
    update: float
    transfer: float
    reduction: float


class Estimate:
    """A recipe's pipeline on some devices.

    Args:
        recipe: what is planned.
        settings: its pipeline, as it was given.
        devices: processes.
        machine: what they are.

    Attributes:
        settings: the same on these devices.
        stages: of one replica.

    Raises:
        ConfigurationError: it cannot be run so.
    """

    def __init__(self, recipe: Recipe, settings: PipelineSettings, devices: int, machine: Machine) -> None:
        self.recipe, self.asked, self.devices, self.machine = recipe, settings, devices, machine
        self.settings = settings.resolved(devices)
        self.stages = Stages(recipe, self.settings, machine.device.is_gpu)

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
        return self.most <= self.machine.room

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
        """Of the whole model; what two stages hold counts once."""
        parameters = (p for unit in self.stages.units for p in unit.module.parameters() if p.requires_grad)
        return sum({id(p): p.numel() for p in parameters}.values())

    @property
    def flops_per_sample(self) -> float:
        """Of a forward and its backward, recomputation included."""
        flops = sum(profile.forward.flops + profile.backward.flops for profile in self.stages.profiles)
        return flops * self.settings.micro_batches / self.recipe.batch_size

    # -- time ---------------------------------------------------------------------------------------------------------

    @cached_property
    def schedules(self) -> dict[str, list[Schedule]]:
        """The recipe's own schedule, and others: name -> schedule of each stage."""
        own = [self.stages.schedule(stage) for stage in range(self.settings.num_stages)]
        delayed = [replace(s, pipeline_rule=StalenessRule(1)) for s in own]
        found = {
            "1F1B": [replace(s, pipeline_rule=StalenessRule(0), lookahead=0) for s in own],
            "least staleness": [replace(s, staleness="least", slack=0) for s in delayed],
            "2BW": [replace(s, staleness="uniform", slack=0) for s in delayed],
        }
        return {**found, self.own: own} if self.settings.delay else found

    @property
    def own(self) -> str:
        """Name of the recipe's own schedule."""
        names = {"least": "least staleness", "uniform": "2BW"}
        return names[self.settings.staleness] if self.settings.delay else "1F1B"

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
        machine, replicas = self.machine, self.settings.data_parallel_size
        mesh = Mesh(self.settings.num_stages, replicas, 0, placement=self.settings.placement)
        found = []
        for stage, profile in enumerate(self.stages.profiles):
            transfer = reduction = 0.0
            if profile.sent is not None:  # in the replica with the slowest link
                pairs = ([mesh.rank_of(stage, r), mesh.rank_of(stage + 1, r)] for r in range(replicas))
                transfer = profile.sent.num_bytes / min(machine.bytes_per_second(pair) for pair in pairs)
            if replicas > 1:  # a ring: every device sends and receives each gradient nearly twice
                speed = machine.bytes_per_second([mesh.rank_of(stage, r) for r in range(replicas)])
                reduction = 2 * (replicas - 1) * (HOP_SECONDS + profile.gradients / replicas / speed)
            forward, backward = (machine.compute(part.flops) for part in (profile.forward, profile.backward))
            found.append(StageTimes(forward, backward, machine.update(profile), transfer, reduction))
        return found

    def _pace(self, schedules: Sequence[Schedule]) -> Pace:
        times = self.times
        return pace_of(
            schedules, self.stages.per_update, lambda stage, _: times[stage].forward,
            lambda stage, _: times[stage].backward, HOP_SECONDS, lambda stage, _: times[stage].update,
            lambda stage, _: times[stage].reduction, lambda stage: times[stage].transfer,
        )  # fmt: skip

"""One configuration, answered: what every stage needs, and how fast it would be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lightning_asyncpp.core.schedule import Schedule, StalenessRule, largest_lookahead
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.tools.plan.devices import GIB
from lightning_asyncpp.tools.plan.in_flight import Memory
from lightning_asyncpp.tools.plan.planned_recipe import Recipe
from lightning_asyncpp.tools.plan.stage_run import Profile
from lightning_asyncpp.tools.plan.stages import Stages
from lightning_asyncpp.tools.plan.timing import Prediction, Speeds, predict


@dataclass(frozen=True)
class Room:
    """What a configuration has to fit.

    Attributes:
        speeds: of the device, which stands in it.
        memory_gib: of the device.
        reserve_gib: of that, what is left free.
    """

    speeds: Speeds
    memory_gib: float
    reserve_gib: float

    @property
    def bytes(self) -> float:
        """What a stage may take."""
        return (self.memory_gib - self.reserve_gib) * GIB

    def shared_by(self, devices: int, before: int) -> Room:
        """The same for more devices: those of a machine whose memory they share have less each."""
        is_own = self.speeds.device.memory_gib > 0
        return self if is_own else replace(self, memory_gib=self.memory_gib * before / devices)


class Question:
    """A recipe under certain settings on a number of devices.

    Args:
        recipe: what is planned.
        settings: its pipeline.
        devices: processes.
        room: what it has to fit.
        batch_size: samples per batch; None for the recipe's.
        stages: what was looked at already, of stages like these.

    Attributes:
        asked: its pipeline as it was given, which leaves open what the number of devices says.
        settings: the same on these devices.

    Raises:
        ConfigurationError: it cannot be run so.
    """

    def __init__(
        self,
        recipe: Recipe,
        settings: PipelineSettings,
        devices: int,
        room: Room,
        batch_size: int | None = None,
        stages: Stages | None = None,
    ) -> None:
        self.recipe, self.asked, self.devices, self.room = recipe, settings, devices, room
        self.settings = settings.resolved(devices)
        self.batch_size = recipe.batch_size if batch_size is None else batch_size
        self.stages = stages or Stages(recipe, self.settings, room.speeds.device.is_gpu)

    def with_settings(self, **changes: Any) -> Question:
        """The same with other settings; what stays the same is not looked at again.

        Raises:
            ConfigurationError: it cannot be run so.
        """
        stages = self.stages if all(name in ("micro_batches", "lookahead") for name in changes) else None
        settings = replace(self.asked, **changes)
        return Question(self.recipe, settings, self.devices, self.room, self.batch_size, stages)

    def with_batch(self, batch_size: int) -> Question:
        """The same with another number of samples per batch."""
        return Question(self.recipe, self.asked, self.devices, self.room, batch_size, self.stages)

    @property
    def micro_batches(self) -> int:
        """m."""
        return self.settings.micro_batches

    @cached_property
    def memory(self) -> list[Memory]:
        """Of each stage, when it needs most."""
        return self.stages.memory(self.settings.micro_batches, self.settings.lookahead, self.batch_size)

    @property
    def most(self) -> int:
        """Bytes of the stage that needs most."""
        return max(memory.total for memory in self.memory)

    @property
    def fits(self) -> bool:
        """Whether every stage fits its device."""
        return self.most <= self.room.bytes

    @cached_property
    def profiles(self) -> list[list[Profile]]:
        """Of each stage, what each micro-batch takes."""
        return self.stages.profiles(self.settings.micro_batches, self.batch_size)

    @cached_property
    def speed(self) -> Prediction:
        """How fast it is with its own schedule."""
        return self._predict(self.schedule)

    def schedule(self, stage: int) -> Schedule:
        """How a stage is run once a synchronous start is over."""
        return self.stages.schedule(stage, self.settings.micro_batches, self.settings.lookahead).schedule

    @cached_property
    def synchronous(self) -> Prediction:
        """How fast the same is with a flush per update: 1F1B."""
        return self._predict(lambda stage: Schedule(stage, self.settings.num_stages, 0, StalenessRule(0)))

    @cached_property
    def asynchronous(self) -> Prediction | None:
        """How fast the same is without a flush; None where that cannot be."""
        if self.settings.delay:
            return self.speed
        stages, replicas = self.settings.num_stages, self.settings.data_parallel_size
        most = largest_lookahead(stages, self.micro_batches, replicas)
        if most < 0 or self.micro_batches < stages:
            return None
        return self._predict(lambda stage: Schedule(stage, stages, staleness="least"))

    def _predict(self, schedule: Callable[[int], Schedule]) -> Prediction:
        settings = self.settings
        return predict(
            [schedule(stage) for stage in range(settings.num_stages)], self.profiles, settings.micro_batches,
            self.room.speeds, settings.data_parallel_size, self.recipe.accumulated,
            settings.placement,
        )  # fmt: skip

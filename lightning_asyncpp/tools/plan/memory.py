"""What a schedule keeps alive on a stage, action by action, given what single microbatches take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_asyncpp.core.schedule import Kind, Schedule
from lightning_asyncpp.tools.plan.profile import Profile

_MINI_BATCHES = 4
"""After three of them nothing changes from one to the next."""


@dataclass(frozen=True)
class Memory:
    """What is alive on a stage when it is most."""

    parts: dict[str, int]  # in bytes: see :func:`peak_of`
    in_flight: int  # number of microbatches
    during: str  # what runs then: forward, backward, reduction or update

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())


def peak_of(schedule: Schedule, profile: Profile, per_update: int, batch: int, replicas: int = 1) -> Memory:
    """Follow the schedule's actions over a few mini-batches and return the moment with the most memory.

    Its parts: weights, versions, buffers, optimizer, correction, batch (the loader's tensors), gradients (all sets),
    activations (of microbatches in flight) and working (the rest of that moment: logits, a microbatch's own gradients).

    Args:
        schedule: of the stage.
        profile: what a microbatch takes there.
        per_update: microbatches per update.
        batch: bytes of a batch on this stage.
        replicas: of the pipeline.
    """
    schedule = replace(schedule, pipeline_rule=replace(schedule.pipeline_rule, synchronous_start=0))
    batches = 2 if schedule.depth and schedule.pipeline_rule.delay else 1
    constant = {
        name: getattr(profile, name) for name in ("weights", "versions", "buffers", "optimizer", "correction")
    } | {"batch": batch * batches}
    flights: dict[int, int] = {}  # microbatch -> what it keeps
    gradients: dict[int, int] = {}  # mini-batch -> its sum, until its update
    moments: list[Memory] = []

    def note(working: int, during: str) -> None:
        alive = {"gradients": sum(gradients.values()), "activations": sum(flights.values())}
        moments.append(Memory({**constant, **alive, "working": working}, len(flights) + (during == "forward"), during))

    for action in schedule.run(_MINI_BATCHES, per_update):
        t, place = divmod(action.index, per_update)
        if action.kind is Kind.UPDATE:
            note(profile.update.peak, "update")
            gradients.pop(action.index, None)
        elif action.kind is Kind.FORWARD:
            note(profile.forward.peak, "forward")
            flights[action.index] = profile.forward.kept
        else:
            note((profile.backward if t in gradients else profile.first_backward).peak, "backward")
            del flights[action.index]
            gradients.setdefault(t, profile.gradients)
            if place == per_update - 1 and replicas > 1:
                note(profile.gradients, "reduction")  # packed for the replicas
    return max(moments, key=lambda moment: moment.total)

"""What a schedule keeps alive on a stage, action by action, given what single microbatches take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_asyncpp.core.schedule import Kind, Schedule
from lightning_asyncpp.tools.plan.profile import Profile

_MINI_BATCHES = 4
"""After three of them nothing changes from one to the next."""


@dataclass(frozen=True)
class Memory:
    """What is alive on a stage when it is most.

    Attributes:
        parts: bytes of weights, versions, buffers, optimizer, correction, batch (the loader's tensors), gradients (all
            sets), activations (of microbatches in flight), messages (gradients of weights that another stage shares)
            and working (the rest of that moment: logits, a microbatch's own gradients).
        in_flight: number of microbatches in flight.
        during: what runs then: forward, backward, reduction or update.
    """

    parts: dict[str, int]
    in_flight: int
    during: str

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class StageRun:
    """How one stage is run.

    Attributes:
        schedule: the order of its actions.
        micro_batches: per batch, m.
        accumulated: batches per update.
        replicas: of the pipeline.
        on_host: whether the stage computes on the host, where messages are part of its memory.
    """

    schedule: Schedule
    micro_batches: int
    accumulated: int = 1
    replicas: int = 1
    on_host: bool = True


def peak_of(run: StageRun, profiles: Sequence[Profile], batch: int) -> Memory:
    """Follow the schedule's actions over a few mini-batches and return the moment with the most memory.

    Args:
        run: how the stage is run.
        profiles: what each microbatch of a batch takes; fewer than m if the batch has fewer samples.
        batch: bytes of a batch on this stage.
    """
    rule = replace(run.schedule.pipeline_rule, synchronous_start=0)
    schedule, profile = replace(run.schedule, pipeline_rule=rule), profiles[0]
    per_update = run.micro_batches * run.accumulated
    reduced = profile.gradients if run.replicas > 1 else 0
    batches = 2 if schedule.depth and rule.delay else 1
    constant = {
        name: getattr(profile, name) for name in ("weights", "versions", "buffers", "optimizer", "correction")
    } | {"batch": batch * batches}
    flights: dict[int, int] = {}  # microbatch -> what it keeps
    gradients: dict[int, int] = {}  # mini-batch -> its sum, until its update
    moments: list[Memory] = []

    def note(working: int, during: str) -> None:
        alive = {"gradients": sum(gradients.values()), "activations": sum(flights.values())}
        arrived = profile.tied if run.on_host and (len(gradients) > 1 or during == "update") else 0
        parts = {**constant, **alive, "messages": arrived, "working": working}
        moments.append(Memory(parts, len(flights) + (during == "forward"), during))

    for action in schedule.run(_MINI_BATCHES, per_update):
        t, place = divmod(action.index, per_update)
        taken = profiles[place % run.micro_batches] if place % run.micro_batches < len(profiles) else None
        if action.kind is Kind.UPDATE:
            note(profile.update.peak, "update")
            gradients.pop(action.index, None)
        elif action.kind is Kind.FORWARD and taken is not None:
            note(taken.forward.peak, "forward")
            flights[action.index] = taken.forward.kept
        elif action.kind is Kind.BACKWARD:
            if taken is not None:
                note((taken.backward if t in gradients else taken.first_backward).peak, "backward")
                del flights[action.index]
                gradients.setdefault(t, profile.gradients)
            if place == per_update - 1 and reduced + profile.tied:
                note(reduced + 2 * profile.tied, "reduction")  # packed for the replicas; a shared one sent and received
    return max(moments, key=lambda moment: moment.total)

"""Predicted times: what every stage computes and sends, at assumed speeds, through the schedules themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_asyncpp.core.ranks.mesh import Mesh, Placement
from lightning_asyncpp.core.schedule import Kind, Schedule
from lightning_asyncpp.core.simulation import simulate
from lightning_asyncpp.core.trace import Span
from lightning_asyncpp.tools.plan.devices import HOP_SECONDS, Device
from lightning_asyncpp.tools.plan.stage_run import Profile

_FIRST, _LAST = 3, 7
"""Mini-batches between which time is taken: by then every one takes as long as the one before."""


@dataclass(frozen=True)
class Speeds:
    """How fast things are.

    Attributes:
        device: the kind of device.
        mfu: share of the peak that forwards and backwards reach, recomputation counted as work.
        bandwidth_share: share of the memory's peak bandwidth that the optimizer reaches.
        per_node: devices of a node.
    """

    device: Device
    mfu: float
    bandwidth_share: float
    per_node: int

    def compute(self, flops: float) -> float:
        """Seconds of a forward or a backward."""
        return flops / (self.device.tflops * 1e12 * self.mfu)

    def update(self, profile: Profile) -> float:
        """Seconds of an update: its bytes through memory, and what it multiplies (Newton-Schulz)."""
        moved = profile.update.moved / (self.device.bandwidth * 1e9 * self.bandwidth_share)
        return moved + self.compute(profile.update.flops)

    def between_stages(self, mesh: Mesh, stage: int) -> float:
        """Bytes per second from a stage to the one after it, in the replica where that is slowest."""
        replicas = range(mesh.num_replicas)
        return min(self._between([mesh.rank_of(stage, r), mesh.rank_of(stage + 1, r)]) for r in replicas)

    def over_replicas(self, mesh: Mesh, stage: int) -> float:
        """Bytes per second on the slowest link of a ring of a stage's replicas."""
        return self._between([mesh.rank_of(stage, r) for r in range(mesh.num_replicas)])

    def _between(self, ranks: Sequence[int]) -> float:
        nodes = {rank // self.per_node for rank in ranks}
        return (self.device.link if len(nodes) == 1 else self.device.network) * 1e9


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage.

    Attributes:
        forward, backward: of the largest micro-batch.
        update: of an update.
        hop: of an activation to the stage after; 0 on the last.
        reduction: of the gradients over the replicas, which goes on beside other work.
        busy: share of the time that it computes, updates included.
    """

    forward: float
    backward: float
    update: float
    hop: float
    reduction: float
    busy: float


@dataclass(frozen=True)
class Prediction:
    """How fast a schedule is.

    Attributes:
        step: seconds per update.
        bubble: share of the time that the busiest stage waits.
        stages: of each.
    """

    step: float
    bubble: float
    stages: tuple[StageTime, ...]


def predict(
    schedules: Sequence[Schedule],
    slots: Sequence[Sequence[Profile]],
    micro_batches: int,
    speeds: Speeds,
    replicas: int,
    accumulated: int = 1,
    placement: Placement = "pipeline_within_node",
) -> Prediction:
    """Simulate a few mini-batches and take the time of those in the middle.

    Args:
        schedules: of each stage.
        slots: of each stage, what every micro-batch of a batch takes.
        micro_batches: per batch.
        speeds: how fast things are.
        replicas: of the pipeline.
        accumulated: batches per update.
        placement: which ranks stand beside each other.
    """
    count, per_update = len(schedules), micro_batches * accumulated

    def profile(stage: int, k: int) -> Profile | None:
        of_stage = slots[stage]
        return of_stage[k % micro_batches] if k % micro_batches < len(of_stage) else None

    def forward(stage: int, k: int) -> float:
        found = profile(stage, k)
        return speeds.compute(found.forward.flops) if found else 0.0

    def backward(stage: int, k: int) -> float:
        found = profile(stage, k)
        return speeds.compute(found.backward_again.flops) if found else 0.0

    mesh = Mesh(count, replicas, 0, placement=placement)
    transfers = [_transfer(slots[stage][0], speeds.between_stages(mesh, stage)) for stage in range(count - 1)]
    reductions = [_reduction(slots[stage][0], replicas, speeds.over_replicas(mesh, stage)) for stage in range(count)]
    updates = [speeds.update(of_stage[0]) for of_stage in slots]
    lanes = simulate(
        schedules, _LAST + 2, per_update, forward, backward, HOP_SECONDS,
        lambda stage, _: updates[stage], lambda stage, _: reductions[stage], lambda stage: transfers[stage],
    )  # fmt: skip
    ends = {span.index: span.end for span in lanes[0] if span.kind is Kind.BACKWARD}
    start, end = (ends[(t + 1) * per_update - 1] for t in (_FIRST, _LAST))
    busy = [_busy(lane, start, end) for lane in lanes]
    hops = [*(HOP_SECONDS + transfer for transfer in transfers), 0.0]
    stages = tuple(
        StageTime(forward(s, 0), backward(s, 0), updates[s], hops[s], reductions[s], busy[s]) for s in range(count)
    )
    return Prediction((end - start) / (_LAST - _FIRST), 1 - max(busy), stages)


def _busy(lane: Sequence[Span], start: float, end: float) -> float:
    worked = sum(max(0.0, min(span.end, end) - max(span.start, start)) for span in lane)
    return worked / (end - start) if end > start else 0.0


def _transfer(profile: Profile, bytes_per_second: float) -> float:
    return profile.sent.num_bytes / bytes_per_second if profile.sent is not None else 0.0


def _reduction(profile: Profile, replicas: int, bytes_per_second: float) -> float:
    """A ring: every device sends and receives each gradient nearly twice."""
    if replicas == 1:
        return 0.0
    steps = 2 * (replicas - 1)
    return steps * (HOP_SECONDS + profile.gradients / replicas / bytes_per_second)

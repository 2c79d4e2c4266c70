"""A plan: everything that is known of a recipe on a kind of device, ready to be printed or written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from lightning_asyncpp.tools.plan.devices import GIB
from lightning_asyncpp.tools.plan.in_flight import Memory
from lightning_asyncpp.tools.plan.limits import Limits, limits_of
from lightning_asyncpp.tools.plan.mends import Mend, mends_of
from lightning_asyncpp.tools.plan.question import Question
from lightning_asyncpp.tools.plan.stage_run import Profile
from lightning_asyncpp.tools.plan.timing import Prediction


@dataclass(frozen=True)
class StagePlan:
    """One stage.

    Attributes:
        units: names of its first and last layer.
        num_units: how many it has.
        num_parameters: trainable values that it holds.
        flops: of a micro-batch, forward and backward.
        memory: when it needs most.
        profile: what one micro-batch takes.
    """

    units: tuple[str, str]
    num_units: int
    num_parameters: int
    flops: int
    memory: Memory
    profile: Profile


@dataclass(frozen=True)
class Plan:
    """A recipe's plan.

    Attributes:
        question: what was asked.
        stages: of one replica.
        num_parameters: of the whole model; what two stages hold counts once.
        samples: per update, over all replicas.
        tokens: the same in tokens; None where a batch has none.
        limits: what could be larger; None if nothing fits.
        mends: what was tried because it does not fit.
    """

    question: Question
    stages: tuple[StagePlan, ...]
    num_parameters: int
    samples: int
    tokens: int | None
    limits: Limits | None
    mends: tuple[Mend, ...]

    @property
    def flops_per_sample(self) -> float:
        """Of a forward and its backward, recomputation included."""
        per_slot = sum(p.forward.flops + p.backward_again.flops for stage in self.question.profiles for p in stage)
        return per_slot / self.question.batch_size

    @property
    def advised(self) -> Mend | None:
        """The first change that is enough."""
        return next((mend for mend in self.mends if mend.fits), None)

    def as_json(self) -> dict[str, Any]:
        """Everything, for other programs; memory in bytes, times in seconds."""
        question, room = self.question, self.question.room
        device = room.speeds.device
        settings = question.settings
        return {
            "device": {
                **asdict(device), "memory_gib": room.memory_gib, "reserve_gib": room.reserve_gib,
                "mfu": room.speeds.mfu, "bandwidth_share": room.speeds.bandwidth_share,
                "per_node": room.speeds.per_node,
            },
            "pipeline": {
                "devices": question.devices, "stages": settings.num_stages, "replicas": settings.data_parallel_size,
                "micro_batches": settings.micro_batches, "lookahead": settings.lookahead, "delay": settings.delay,
                "weight_dtype": settings.weight_dtype, "accumulated": question.recipe.accumulated,
                "fresh_last_stage": settings.fresh_last_stage,
                "partition": list(question.stages.cut.counts), "partition_chosen": question.stages.cut.partition.source,
                "precision": str(question.recipe.trainer.precision),
            },
            "parameters": self.num_parameters,
            "samples_per_update": self.samples,
            "tokens_per_update": self.tokens,
            "flops_per_sample": self.flops_per_sample,
            "fits": question.fits,
            "stages": [_stage_as_json(stage) for stage in self.stages],
            "predicted": _speed_as_json(question.speed, self),
            "synchronous": _speed_as_json(question.synchronous, self),
            "asynchronous": None if question.asynchronous is None else _speed_as_json(question.asynchronous, self),
            "limits": None if self.limits is None else asdict(self.limits),
            "mends": [
                {"change": m.change, "cost": m.cost, "bytes": m.most, "fits": m.fits, "step": m.step}
                for m in self.mends
            ],
            "notes": self.notes,
        }  # fmt: skip

    @property
    def notes(self) -> list[str]:
        """What was taken for granted."""
        return list(dict.fromkeys(filter(None, [*self.question.recipe.notes, self.question.stages.cut.note])))


def plan(question: Question, search: bool = True) -> Plan:
    """Answer a question.

    Args:
        question: what is asked.
        search: also say how far it can be stretched, or what to change.
    """
    cut = question.stages.cut
    stages = []
    for index, (memory, slots) in enumerate(zip(question.memory, question.profiles)):
        names = [unit.name for unit in cut.units[cut.first(index) : cut.first(index) + cut.counts[index]]]
        largest = slots[0]
        flops = largest.forward.flops + largest.backward_again.flops
        stages.append(StagePlan((names[0], names[-1]), len(names), largest.num_parameters, flops, memory, largest))
    parameters = {id(p): p.numel() for unit in cut.units for p in unit.module.parameters() if p.requires_grad}
    updates = question.recipe.accumulated * question.settings.data_parallel_size
    samples = question.batch_size * updates
    tokens = _tokens(question.recipe.batch)
    return Plan(
        question, tuple(stages), sum(parameters.values()), samples,
        None if tokens is None else tokens * updates,
        limits_of(question) if search and question.fits else None,
        tuple(mends_of(question)) if search and not question.fits else (),
    )  # fmt: skip


def gib(size: float) -> float:
    """Bytes in GiB."""
    return size / GIB


def _tokens(batch: Any) -> int | None:
    """Targets of a batch of token sequences, (batch, time + 1) whole numbers; None if it is something else."""
    if not isinstance(batch, Tensor) or batch.ndim != 2 or batch.is_floating_point():
        return None
    return batch.shape[0] * (batch.shape[1] - 1)


def _stage_as_json(stage: StagePlan) -> dict[str, Any]:
    profile = stage.profile
    readings: Sequence[tuple[str, Any]] = (
        ("forward", profile.forward), ("backward", profile.backward_again), ("update", profile.update),
    )  # fmt: skip
    return {
        "layers": list(stage.units), "num_layers": stage.num_units, "parameters": stage.num_parameters,
        "flops_per_micro_batch": stage.flops, "bytes": {**asdict(stage.memory), "total": stage.memory.total},
        "per_micro_batch": {name: asdict(reading) for name, reading in readings},
        "sent_bytes": 0 if profile.sent is None else profile.sent.num_bytes,
    }  # fmt: skip


def _speed_as_json(speed: Prediction, plan: Plan) -> Mapping[str, Any]:
    return {
        **asdict(speed), "samples_per_second": plan.samples / speed.step,
        "tokens_per_second": None if plan.tokens is None else plan.tokens / speed.step,
    }  # fmt: skip

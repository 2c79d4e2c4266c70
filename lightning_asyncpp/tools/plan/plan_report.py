"""A plan: everything that is known of a recipe on a kind of device, as JSON and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from lightning_asyncpp.core.cut.units import telling
from lightning_asyncpp.tools.plan.devices import GIB
from lightning_asyncpp.tools.plan.in_flight import Memory
from lightning_asyncpp.tools.plan.question import Question
from lightning_asyncpp.tools.plan.search import MOST_SAMPLES, Limits, Mend, limits_of, mends_of
from lightning_asyncpp.tools.plan.stage_run import Profile
from lightning_asyncpp.tools.plan.timing import Prediction

_WIDTH = 120
_COLUMNS = ("weights", "versions", "gradients", "optimizer", "correction", "activations", "working", "other")


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


_NO_SLACK = (
    "without a slack every update waits until its gradients are summed over the replicas, which is in no time here;"
    " slack=1 hides it behind a micro-batch"
)


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
                "staleness": settings.staleness, "slack": settings.slack, "gradient_staleness": _stale(question),
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
        """What was taken for granted, or is in no figure."""
        waits = _NO_SLACK if self.question.settings.waits_for_replicas else None
        return list(dict.fromkeys(filter(None, [*self.question.recipe.notes, self.question.stages.cut.note, waits])))


def plan(question: Question, search: bool = True) -> Plan:
    """Answer a question.

    Args:
        question: what is asked.
        search: also say how far it can be stretched, or what to change.
    """
    cut = question.stages.cut
    stages = []
    for index, (memory, slots) in enumerate(zip(question.memory, question.profiles)):
        units = cut.units[cut.first(index) : cut.first(index) + cut.counts[index]]
        names = telling([unit.name for unit in units])
        largest = slots[0]
        flops = largest.forward.flops + largest.backward_again.flops
        stages.append(StagePlan((names[0], names[-1]), len(units), largest.num_parameters, flops, memory, largest))
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


def table(plan: Plan) -> str:
    """Memory of every stage, the predicted speed, and what follows from both."""
    blocks = [_headline(plan), _memory(plan), _speed(plan), _advice(plan), _assumptions(plan)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _headline(plan: Plan) -> list[str]:
    question = plan.question
    settings, device = question.settings, question.room.speeds.device
    replicas = f" x {settings.data_parallel_size} replicas" if settings.data_parallel_size > 1 else ""
    schedule = f"lookahead {settings.lookahead}, no flush" if settings.delay else "a flush per update"
    if settings.staleness != "uniform":
        schedule += f", gradients {', '.join(f'{updates:.3g}' for updates in _stale(question))} updates old"
    per = question.batch_size / settings.micro_batches
    tokens = "" if plan.tokens is None else f" ({_count(plan.tokens)} tokens)"
    batches = f" in {question.recipe.accumulated} batches" if question.recipe.accumulated > 1 else ""
    lines = [
        f"{_count(plan.num_parameters)} parameters on {question.devices} x {device.name}: {settings.num_stages} stages"
        f"{replicas}, {schedule}; partition {list(question.stages.cut.counts)}"
        f" {question.stages.cut.partition.source if settings.num_stages > 1 else ''}".rstrip(),
        f"{plan.samples} samples{tokens} per update{batches}, {settings.micro_batches} micro-batches of {per:g};"
        f" {_count(plan.flops_per_sample)}FLOP per sample, forward and backward; precision"
        f" {question.recipe.trainer.precision}",
    ]
    return [part for line in lines for part in textwrap.wrap(line, _WIDTH)]


def _stale(question: Question) -> list[float]:
    """How many updates old the gradients of each stage are."""
    count = question.settings.micro_batches * question.recipe.accumulated
    return [question.schedule(s).stage_rule.staleness(count) for s in range(question.settings.num_stages)]


def _memory(plan: Plan) -> list[str]:
    unit, per = ("GiB", 2**30) if any(s.memory.total > 2**30 for s in plan.stages) else ("MiB", 2**20)
    titles = ["stage", "layers", "params", *_COLUMNS, "total", "flights", "during", "fits"]
    rows = [titles]
    for index, stage in enumerate(plan.stages):
        values = [f"{value / per:.2f}" for value in _parts(stage.memory)]
        fits = "yes" if stage.memory.total <= plan.question.room.bytes else "NO"
        rows.append([
            str(index), f"{stage.num_units}: {_layers(stage)}", _count(stage.num_parameters), *values,
            f"{stage.memory.total / per:.2f}", str(stage.memory.in_flight), stage.memory.during, fits,
        ])  # fmt: skip
    room = plan.question.room
    held = f"memory in {unit}, when a stage needs most; a device has {room.memory_gib:.1f} GiB"
    if room.reserve_gib:
        held += f", of which {room.reserve_gib:.1f} stay free"
    return [*_columns(rows), held]


def _parts(memory: Memory) -> list[int]:
    other = memory.buffers + memory.batch + memory.messages
    shown = [name for name in _COLUMNS if name != "other"]
    return [*(getattr(memory, name) for name in shown), other]


def _speed(plan: Plan) -> list[str]:
    question = plan.question
    rows = [["schedule", "ms per update", "samples/s", "tokens/s", "bubble", "against 1F1B"]]
    sync, own, other = question.synchronous, question.speed, question.asynchronous
    rows.append(_speed_row(plan, "1F1B, with a flush", sync, sync))
    if question.settings.delay:
        names = {"least": "least staleness", "uniform": "2BW"}
        name = names[question.settings.staleness]
        rows.append(_speed_row(plan, f"{name}, lookahead {question.settings.lookahead}", own, sync))
    elif other is not None:
        rows.append(_speed_row(plan, "least staleness, without", other, sync))
    stage_rows = [["stage", "forward ms", "backward ms", "update ms", "message ms", "busy"]]
    for index, time in enumerate(own.stages):
        stage_rows.append([
            str(index), *(f"{1e3 * seconds:.3g}" for seconds in (time.forward, time.backward, time.update, time.hop)),
            f"{100 * time.busy:.0f} %",
        ])  # fmt: skip
    return [*_columns(rows), "", *_columns(stage_rows)]


def _speed_row(plan: Plan, name: str, speed: Prediction, sync: Prediction) -> list[str]:
    tokens = "-" if plan.tokens is None else f"{plan.tokens / speed.step:,.0f}"
    return [
        name, _milliseconds(speed.step), f"{plan.samples / speed.step:.4g}", tokens, f"{100 * speed.bubble:.1f} %",
        f"{sync.step / speed.step:.2f}x",
    ]  # fmt: skip


def _advice(plan: Plan) -> list[str]:
    question = plan.question
    lines = []
    if plan.limits is not None:
        limits = plan.limits
        if limits.lookahead is not None:
            lines.append(f"largest lookahead that fits: {limits.lookahead}")
        if limits.micro_batches is not None:
            lines.append(
                f"fewest micro-batches that this batch fits in: {limits.micro_batches}"
                f" (of {question.batch_size // limits.micro_batches} samples)"
            )
        if limits.samples is not None:
            more = " or more" if limits.samples == MOST_SAMPLES else ""
            lines.append(f"largest micro-batch with {question.micro_batches} of them: {limits.samples} samples{more}")
    if not question.fits:
        lines.append(
            f"It does not fit: {gib(question.most):.2f} GiB on the fullest stage, {gib(question.room.bytes):.2f} are"
            " there. Tried, in this order:"
        )
        for mend in plan.mends:
            verdict = "fits" if mend.fits else "is not enough"
            lines.append(
                f"  {mend.change}\n    {verdict}: {gib(mend.most):.2f} GiB, {_milliseconds(mend.step)} ms per update"
                f" ({mend.cost})"
            )
        if plan.advised is not None:
            lines.append(f"First thing to change: {plan.advised.change}")
        elif plan.mends:
            lines.append("None of them is enough: use devices with more memory, or a smaller model or batch")
    return lines


def _assumptions(plan: Plan) -> list[str]:
    speeds = plan.question.room.speeds
    device = speeds.device
    text = (
        f"Memory was counted by running every stage on tensors without memory; no kernel's own workspace shows."
        f" Times assume {100 * speeds.mfu:.0f} % of {device.tflops:g} TFLOP/s in forwards and backwards, every product"
        f" in bf16, {100 * speeds.bandwidth_share:.0f} % of {device.bandwidth:g} GB/s in updates, {device.link:g} GB/s"
        f" between devices of a node ({speeds.per_node}) and {device.network:g} GB/s between nodes, and nothing else:"
        f" no data loading, no Python. Figures of {device.name}: {device.source}."
    )
    texts = [text, *(f"Note: {note}." for note in plan.notes)]
    return [line for text in texts for line in textwrap.wrap(text, _WIDTH)]


def _milliseconds(seconds: float) -> str:
    """Of an update: four digits, or all before the point."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.4g}"


def _layers(stage: StagePlan) -> str:
    first, last = stage.units
    return first if first == last else f"{first} to {last}"


def _count(number: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g} "


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = {column for column, title in enumerate(rows[0]) if title in ("schedule", "layers", "during")}
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]

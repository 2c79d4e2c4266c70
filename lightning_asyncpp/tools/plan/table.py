"""A plan as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from lightning_asyncpp.tools.plan.in_flight import Memory
from lightning_asyncpp.tools.plan.limits import MOST_SAMPLES
from lightning_asyncpp.tools.plan.plan import Plan, StagePlan, gib
from lightning_asyncpp.tools.plan.timing import Prediction

_WIDTH = 120
_COLUMNS = ("weights", "versions", "gradients", "optimizer", "correction", "activations", "working", "other")


def table(plan: Plan) -> str:
    """Memory of every stage, the predicted speed, and what follows from both."""
    blocks = [_headline(plan), _memory(plan), _speed(plan), _advice(plan), _assumptions(plan)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _headline(plan: Plan) -> list[str]:
    question = plan.question
    settings, device = question.settings, question.room.speeds.device
    replicas = f" x {settings.data_parallel_size} replicas" if settings.data_parallel_size > 1 else ""
    schedule = f"lookahead {settings.lookahead}, no flush" if settings.delay else "a flush per update"
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
        rows.append(_speed_row(plan, f"2BW, lookahead {question.settings.lookahead}", own, sync))
    elif other is not None:
        rows.append(_speed_row(plan, "2BW, without", other, sync))
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

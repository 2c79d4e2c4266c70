"""A plan as text, and for other programs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_asyncpp.core.cut.units import telling
from lightning_asyncpp.tools.plan.changes import Change
from lightning_asyncpp.tools.plan.devices import GIB
from lightning_asyncpp.tools.plan.estimate import Estimate
from lightning_asyncpp.tools.text import columns

_WIDTH = 120
_PARTS = ("weights", "versions", "gradients", "optimizer", "correction", "activations", "working")


@dataclass(frozen=True)
class Report:
    """A recipe's estimate, and the changes that were tried if it does not fit."""

    estimate: Estimate
    changes: Sequence[Change] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """Return everything; memory in bytes, times in seconds."""
        plan, settings, machine = self.estimate, self.estimate.settings, self.estimate.machine
        return {
            "machine": asdict(machine),
            "settings": asdict(settings) | {"compute_dtype": str(settings.compute_dtype)},
            "partition": {"counts": list(plan.stages.partition.counts), "chosen": plan.stages.partition.source},
            "devices": plan.devices,
            "parameters": plan.num_parameters,
            "samples_per_update": plan.samples,
            "tokens_per_update": plan.tokens,
            "flops_per_sample": plan.flops_per_sample,
            "fits": plan.fits,
            "stages": [self._stage(index) for index in range(settings.num_stages)],
            "schedule": plan.own,
            "schedules": {n: {**asdict(pace), "staleness": plan.staleness(n)} for n, pace in plan.paces.items()},
            "changes": [
                {"change": c.arguments, "bytes": c.estimate.most, "fits": c.estimate.fits, "step": c.estimate.step}
                for c in self.changes
            ],
            "notes": self.notes,
        }

    @property
    def notes(self) -> list[str]:
        """What was taken for granted, or is in no figure."""
        return list(dict.fromkeys(self.estimate.recipe.notes))

    def _stage(self, index: int) -> dict[str, Any]:
        plan, memory, profile = self.estimate, self.estimate.memory[index], self.estimate.stages.profiles[index]
        return {
            "layers": telling([unit.name for unit in plan.stages.units_of(index)]),
            "parameters": profile.num_parameters, "bytes": {**memory.parts, "total": memory.total},
            "in_flight": memory.in_flight, "during": memory.during, "seconds": asdict(plan.times[index]),
            "sent_bytes": 0 if profile.sent is None else profile.sent.num_bytes,
        }  # fmt: skip

    def table(self) -> str:
        """Return memory of every stage, speed of the schedules, and what follows from both."""
        blocks = [self._headline(), self._memory(), self._speed(), self._advice(), self._assumptions()]
        return "\n\n".join("\n".join(block) for block in blocks if block)

    def _headline(self) -> list[str]:
        plan, settings = self.estimate, self.estimate.settings
        replicas = f" x {settings.data_parallel_size} replicas" if settings.data_parallel_size > 1 else ""
        stale = ", ".join(f"{updates:.3g}" for updates in plan.staleness(plan.own))
        tokens = "" if plan.tokens is None else f" ({_count(plan.tokens)} tokens)"
        batches = f" in {plan.recipe.accumulated} batches" if plan.recipe.accumulated > 1 else ""
        text = (
            f"{_count(plan.num_parameters)} parameters on {plan.devices} x {plan.machine.device.name}:"
            f" {settings.num_stages} stages{replicas}, {plan.own}, lookahead {settings.lookahead}, gradients {stale}"
            f" updates old; partition {list(plan.stages.partition.counts)} {plan.stages.partition.source}."
            f" {plan.samples} samples{tokens} per update{batches}, {settings.micro_batches} micro-batches of"
            f" {plan.recipe.batch_size / settings.micro_batches:g}; {_count(plan.flops_per_sample)}FLOP per sample,"
            f" forward and backward; precision {plan.recipe.trainer.precision}"
        )
        return textwrap.wrap(text, _WIDTH)

    def _memory(self) -> list[str]:
        plan, machine = self.estimate, self.estimate.machine
        unit, per = ("GiB", GIB) if plan.most > GIB else ("MiB", 2**20)
        rows = [["stage", "layers", "params", *_PARTS, "other", "total", "flights", "during", "fits"]]
        for index, memory in enumerate(plan.memory):
            names = telling([unit.name for unit in plan.stages.units_of(index)])
            other = sum(size for part, size in memory.parts.items() if part not in _PARTS)
            sizes = [*(memory.parts[part] for part in _PARTS), other, memory.total]
            rows.append([
                str(index), f"{len(names)}: {' to '.join(dict.fromkeys((names[0], names[-1])))}",
                _count(plan.stages.profiles[index].num_parameters), *(f"{size / per:.2f}" for size in sizes),
                str(memory.in_flight), memory.during, "yes" if memory.total <= machine.room else "NO",
            ])  # fmt: skip
        held = f"memory in {unit}, when a stage needs most; a device has {machine.memory_gib:.1f} GiB"
        free = f", of which {machine.reserve_gib:.1f} stay free" if machine.reserve_gib else ""
        return [*columns(rows, left=(1, 12)), held + free]

    def _speed(self) -> list[str]:
        plan, sync = self.estimate, self.estimate.paces["1F1B"]
        rows = [["schedule", "ms per update", "samples/s", "tokens/s", "bubble", "updates old", "against 1F1B"]]
        for name, pace in plan.paces.items():
            rows.append([
                name + (" (the recipe's)" if name == plan.own else ""), _milliseconds(pace.step),
                f"{plan.samples / pace.step:.4g}", "-" if plan.tokens is None else f"{plan.tokens / pace.step:,.0f}",
                f"{100 * max(0.0, 1 - max(pace.busy)):.1f} %", f"{max(plan.staleness(name)):.3g}",
                f"{sync.step / pace.step:.2f}x",
            ])  # fmt: skip
        stages = [["stage", "forward ms", "backward ms", "update ms", "message ms", "busy"]]
        for index, (times, busy) in enumerate(zip(plan.times, plan.paces[plan.own].busy)):
            seconds = (times.forward, times.backward, times.update, times.transfer)
            stages.append([str(index), *(f"{1e3 * value:.3g}" for value in seconds), f"{100 * busy:.0f} %"])
        return [*columns(rows), "", *columns(stages)]

    def _advice(self) -> list[str]:
        plan = self.estimate
        if plan.fits:
            return []
        lines = [
            f"It does not fit: {plan.most / GIB:.2f} GiB on the fullest stage, {plan.machine.room / GIB:.2f} are there."
            " Tried, in this order:"
        ]
        for change in self.changes:
            verdict = "fits" if change.estimate.fits else "is not enough"
            step = _milliseconds(change.estimate.step)
            lines.append(
                f"  {change.arguments}\n    {verdict}: {change.estimate.most / GIB:.2f} GiB, {step} ms per update"
            )
        if not self.changes or not self.changes[-1].estimate.fits:
            lines.append("None of them is enough: use devices with more memory, or a smaller model or batch")
        return lines

    def _assumptions(self) -> list[str]:
        machine, device = self.estimate.machine, self.estimate.machine.device
        text = (
            "Memory was counted by running every stage on tensors without memory; no kernel's own workspace shows."
            f" Times assume {100 * machine.mfu:.0f} % of {device.tflops:g} TFLOP/s in forwards and backwards,"
            f" {100 * machine.bandwidth_share:.0f} % of {device.bandwidth:g} GB/s in updates, {device.link:g} GB/s"
            f" between devices of a node ({machine.per_node}) and {device.network:g} GB/s between nodes, and nothing"
            f" else: no data loading, no Python. Figures of {device.name}: {device.source}."
        )
        return [line for part in (text, *(f"Note: {n}." for n in self.notes)) for line in textwrap.wrap(part, _WIDTH)]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.4g}"


def _count(number: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g} "

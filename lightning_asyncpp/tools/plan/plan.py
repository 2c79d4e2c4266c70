"""``asyncpp plan RECIPE``: estimate whether a recipe fits on a kind of device, and its speed, without training."""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, UnsupportedOperatorException

from lightning_asyncpp.core.cut.units import telling
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.command import read_configuration
from lightning_asyncpp.lightning_cli.messages import quiet
from lightning_asyncpp.tools.parsers import columns, metric, plan_parser
from lightning_asyncpp.tools.plan.devices import GIB, device_of
from lightning_asyncpp.tools.plan.estimate import Estimate
from lightning_asyncpp.tools.plan.recipe import build

_WIDTH = 120


def as_json(plan: Estimate) -> dict[str, Any]:
    """Return the plan as JSON values: bytes and seconds, except in ``"device"``, which has the units of ``Device``."""
    recipe, settings, batch = plan.recipe, plan.settings, plan.recipe.batch
    samples = recipe.batch_size * recipe.trainer.accumulate_grad_batches * settings.data_parallel_size
    has_tokens = isinstance(batch, Tensor) and batch.ndim == 2 and not batch.is_floating_point()  # (batch, time + 1)
    flops = sum(profile.forward.flops + profile.backward.flops for profile in plan.profiles)
    return {
        "device": asdict(plan.device),
        "settings": asdict(settings) | {"compute_dtype": str(settings.compute_dtype)},
        "precision": recipe.trainer.precision,
        "partition": {"counts": list(plan.partition.counts), "chosen": plan.partition.source},
        "devices": recipe.devices,
        "parameters": sum(p.numel() for p in recipe.model.parameters() if p.requires_grad),
        "samples_per_update": samples,
        "tokens_per_update": samples * (batch.shape[1] - 1) if has_tokens else None,
        "flops_per_sample": flops * settings.microbatches / recipe.batch_size,  # recomputation included
        "room": plan.device.room,
        "fits": all(memory.total <= plan.device.room for memory in plan.memory),
        "stages": [_stage(plan, index) for index in range(settings.num_stages)],
        "schedule": plan.own,
        "schedules": {n: {**asdict(pace), "staleness": plan.staleness(n)} for n, pace in plan.paces.items()},
    }


def _stage(plan: Estimate, index: int) -> dict[str, Any]:
    memory, profile = plan.memory[index], plan.profiles[index]
    return {
        "layers": telling([unit.name for unit in plan.units_of(index)]),
        "parameters": profile.num_parameters,
        "bytes": {**memory.parts, "total": memory.total},
        "in_flight": memory.in_flight,
        "during": memory.during,
        "seconds": asdict(plan.times[index]),
        "sent_bytes": 0 if profile.sent is None else profile.sent.num_bytes,
    }


def table(plan: Mapping[str, Any]) -> str:
    """Return a plan of :func:`as_json` as text: memory by stage, speed by schedule, advice and assumptions."""
    blocks = [_headline(plan), _memory(plan), _speed(plan), _advice(plan), _assumptions(plan["device"])]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _headline(plan: Mapping[str, Any]) -> list[str]:
    settings, partition = plan["settings"], plan["partition"]
    tokens = "" if plan["tokens_per_update"] is None else f" ({metric(plan['tokens_per_update'])} tokens)"
    ages = ", ".join(f"{age:.3g}" for age in plan["schedules"][plan["schedule"]]["staleness"])
    return textwrap.wrap(
        f"{metric(plan['parameters'])} parameters in {plan['precision']} on {plan['devices']} x"
        f" {plan['device']['name']}: {settings['num_stages']} stages x {settings['data_parallel_size']} replicas,"
        f" partition {partition['counts']} {partition['chosen']}. {plan['schedule']}, lookahead"
        f" {settings['lookahead']}; gradients {ages} updates old. {plan['samples_per_update']} samples{tokens} per"
        f" update, {settings['microbatches']} microbatches per batch; {metric(plan['flops_per_sample'])}FLOP per"
        " sample, forward and backward",
        _WIDTH,
    )


def _memory(plan: Mapping[str, Any]) -> list[str]:
    stages, busy = plan["stages"], plan["schedules"][plan["schedule"]]["busy"]
    sizes = [stage["bytes"] for stage in stages]
    unit, per = ("GiB", GIB) if max(size["total"] for size in sizes) > GIB else ("MiB", 2**20)
    parts = [part for part in sizes[0] if any(size[part] >= 0.01 * size["total"] for size in sizes)]  # not negligible
    rows = [["stage", "layers", "params", *parts, "in flight", "fits", "busy"]]
    for index, stage in enumerate(stages):
        names = stage["layers"]
        rows.append([
            str(index), f"{len(names)}: {' to '.join(dict.fromkeys((names[0], names[-1])))}",
            metric(stage["parameters"]), *(f"{stage['bytes'][part] / per:.2f}" for part in parts),
            str(stage["in_flight"]), "yes" if stage["bytes"]["total"] <= plan["room"] else "NO", f"{busy[index]:.0%}",
        ])  # fmt: skip
    room = f"{plan['room'] / GIB:.1f} GiB"
    return [*columns(rows, left=(1,)), f"memory in {unit}, at the stage's peak; a stage may take {room}"]


def _speed(plan: Mapping[str, Any]) -> list[str]:
    sync, tokens = plan["schedules"]["1F1B"]["step"], plan["tokens_per_update"]
    rows = [["schedule", "ms per update", "samples/s", "tokens/s", "bubble", "phi", "against 1F1B"]]
    for name, pace in plan["schedules"].items():
        step = pace["step"]
        rows.append([
            name + (" (the recipe's)" if name == plan["schedule"] else ""), _milliseconds(step),
            f"{plan['samples_per_update'] / step:.4g}", "-" if tokens is None else f"{tokens / step:,.0f}",
            f"{max(0.0, 1 - max(pace['busy'])):.1%}", f"{_phi(pace['staleness']):.2f}", f"{sync / step:.2f}x",
        ])  # fmt: skip
    return columns(rows)


def _phi(staleness: Sequence[float]) -> float:
    """Root mean square over the stages, of which the cost in loss is a function (docs/research/evidence.md)."""
    return math.sqrt(statistics.fmean(age**2 for age in staleness))


def _advice(plan: Mapping[str, Any]) -> list[str]:
    text = (
        "The recipe does not fit. Remedies, the cheapest first: lookahead 0 and more microbatches of the strategy;"
        " activation_checkpointing of the model (selective, then block); more --devices."
    )
    return [] if plan["fits"] else textwrap.wrap(text, _WIDTH)


def _assumptions(device: Mapping[str, Any]) -> list[str]:
    return textwrap.wrap(
        f"Speeds are upper bounds: {device['mfu']:.0%} of {device['tflops']:g} TFLOP/s in forwards and backwards,"
        f" {device['bandwidth_share']:.0%} of {device['bandwidth']:g} GB/s in updates, {device['link']:g} GB/s between"
        f" the {device['devices_per_node']} devices of a node, {device['network']:g} GB/s between nodes. The time"
        " of data loading, Python and kernel launches is not counted; it matters if layers are small. Memory for"
        " workspaces of kernels is not counted either.",
        _WIDTH,
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.4g}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan; exit with code 1 if the recipe does not fit.

    Raises:
        ConfigurationError: the recipe cannot be run.
    """
    own, rest = plan_parser().parse_known_args(argv)
    try:
        with quiet():  # messages would be about the devices of this machine
            recipe = build(read_configuration(["fit", *rest]), own.devices)
            content = as_json(Estimate(recipe, device_of(own.device, recipe, own.memory, own.mfu)))
    except (DataDependentOutputException, UnsupportedOperatorException) as error:
        raise ConfigurationError(
            f"a layer or the optimizer looks at values of tensors, which a plan does not compute: {error}"
        ) from error
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise ConfigurationError(str(error)) from error
    text = json.dumps(content, indent=2)
    print(text if own.json == "-" else table(content))
    if own.json not in (None, "-"):
        Path(own.json).write_text(text + "\n", encoding="utf-8")
    if not content["fits"]:
        raise SystemExit(1)

"""``asyncpp plan RECIPE``: whether a recipe fits on a kind of device, and how fast it would be; nothing is trained."""

from __future__ import annotations

import json
import logging
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch._subclasses.fake_tensor import DataDependentOutputException, UnsupportedOperatorException

from lightning_asyncpp.core.cut.units import telling
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.command import read_configuration
from lightning_asyncpp.tools.parsers import plan_parser
from lightning_asyncpp.tools.plan.devices import GIB, device_of
from lightning_asyncpp.tools.plan.estimate import Estimate
from lightning_asyncpp.tools.plan.recipe import build
from lightning_asyncpp.tools.tool_parser import columns, write_json

_WIDTH = 120


def as_json(plan: Estimate, changes: Sequence[Change]) -> dict[str, Any]:
    """Return everything; memory in bytes, times in seconds.

    Args:
        plan: of the recipe.
        changes: that were tried if it does not fit.
    """
    settings = plan.settings
    return {
        "device": asdict(plan.device),
        "settings": asdict(settings) | {"compute_dtype": str(settings.compute_dtype)},
        "precision": plan.recipe.trainer.precision,
        "partition": {"counts": list(plan.partition.counts), "chosen": plan.partition.source},
        "devices": plan.recipe.devices,
        "parameters": plan.num_parameters,
        "samples_per_update": plan.samples,
        "tokens_per_update": plan.tokens,
        "flops_per_sample": plan.flops_per_sample,
        "fits": plan.fits,
        "stages": [_stage(plan, index) for index in range(settings.num_stages)],
        "schedule": plan.own,
        "schedules": {n: {**asdict(pace), "staleness": plan.staleness(n)} for n, pace in plan.paces.items()},
        "changes": [
            {"change": arguments, "bytes": new.most, "fits": new.fits, "step": new.paces[new.own].step}
            for arguments, new in changes
        ],
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
    """Return memory of every stage, speed of the schedules, and what follows from both, of :func:`as_json`."""
    blocks = [_headline(plan), _memory(plan), _speed(plan), _advice(plan), _assumptions(plan["device"])]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _headline(plan: Mapping[str, Any]) -> list[str]:
    settings, partition = plan["settings"], plan["partition"]
    tokens = "" if plan["tokens_per_update"] is None else f" ({_count(plan['tokens_per_update'])} tokens)"
    ages = ", ".join(f"{age:.3g}" for age in plan["schedules"][plan["schedule"]]["staleness"])
    return textwrap.wrap(
        f"{_count(plan['parameters'])} parameters in {plan['precision']} on {plan['devices']} x"
        f" {plan['device']['name']}: {settings['num_stages']} stages x {settings['data_parallel_size']} replicas,"
        f" partition {partition['counts']} {partition['chosen']}. {plan['schedule']}, lookahead"
        f" {settings['lookahead']}; gradients {ages} updates old. {plan['samples_per_update']} samples{tokens} per"
        f" update, {settings['micro_batches']} micro-batches per batch; {_count(plan['flops_per_sample'])}FLOP per"
        " sample, forward and backward",
        _WIDTH,
    )


def _memory(plan: Mapping[str, Any]) -> list[str]:
    stages, device = plan["stages"], plan["device"]
    room, busy = device["memory"] - device["reserve"], plan["schedules"][plan["schedule"]]["busy"]
    sizes = [stage["bytes"] for stage in stages]
    unit, per = ("GiB", GIB) if max(size["total"] for size in sizes) > GIB else ("MiB", 2**20)
    parts = [part for part in sizes[0] if any(size[part] >= 0.01 * size["total"] for size in sizes)]  # of some weight
    rows = [["stage", "layers", "params", *parts, "flights", "fits", "busy"]]
    for index, stage in enumerate(stages):
        names = stage["layers"]
        rows.append([
            str(index), f"{len(names)}: {' to '.join(dict.fromkeys((names[0], names[-1])))}",
            _count(stage["parameters"]), *(f"{stage['bytes'][part] / per:.2f}" for part in parts),
            str(stage["in_flight"]), "yes" if stage["bytes"]["total"] <= room * GIB else "NO", f"{busy[index]:.0%}",
        ])  # fmt: skip
    return [*columns(rows, left=(1,)), f"memory in {unit}, when a stage needs most; a device has {room:.1f} GiB for it"]


def _speed(plan: Mapping[str, Any]) -> list[str]:
    sync, tokens = plan["schedules"]["1F1B"]["step"], plan["tokens_per_update"]
    rows = [["schedule", "ms per update", "samples/s", "tokens/s", "bubble", "updates old", "against 1F1B"]]
    for name, pace in plan["schedules"].items():
        step = pace["step"]
        rows.append([
            name + (" (the recipe's)" if name == plan["schedule"] else ""), _milliseconds(step),
            f"{plan['samples_per_update'] / step:.4g}", "-" if tokens is None else f"{tokens / step:,.0f}",
            f"{max(0.0, 1 - max(pace['busy'])):.1%}", f"{max(pace['staleness']):.3g}", f"{sync / step:.2f}x",
        ])  # fmt: skip
    return columns(rows)


def _advice(plan: Mapping[str, Any]) -> list[str]:
    if plan["fits"]:
        return []
    lines = ["It does not fit. Tried, in this order:"]
    for change in plan["changes"]:
        verdict = "fits" if change["fits"] else "is not enough"
        lines += [
            f"  {change['change']}",
            f"    {verdict}: {change['bytes'] / GIB:.2f} GiB, {_milliseconds(change['step'])} ms per update",
        ]
    return lines


def _assumptions(device: Mapping[str, Any]) -> list[str]:
    return textwrap.wrap(
        f"Assumed: {device['mfu']:.0%} of {device['tflops']:g} TFLOP/s in forwards and backwards,"
        f" {device['bandwidth_share']:.0%} of {device['bandwidth']:g} GB/s in updates, {device['link']:g} GB/s between"
        f" the {device['devices_per_node']} devices of a node, {device['network']:g} GB/s between nodes; no data"
        " loading, no Python, no workspace of kernels.",
        _WIDTH,
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.4g}"


def _count(number: float) -> str:
    """A number with what stands before a unit."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g} "


_CHECKPOINTING = "--model.init_args.activation_checkpointing"
_PIPELINE = "--trainer.strategy.init_args."
_MICRO_BATCHES, _LOOKAHEAD, _PARTITION = (_PIPELINE + name for name in ("micro_batches", "lookahead", "partition"))


Change = tuple[str, Estimate]
"""Arguments of the command, and what becomes of the recipe with them."""


def changes_of(estimate: Estimate, plan: Callable[[Sequence[str]], Estimate]) -> list[Change]:
    """Try changes, those that cost least first; end with the first that is enough.

    Args:
        estimate: of the recipe as it is.
        plan: further arguments of the command -> what it says with them.
    """
    tried: list[Change] = []
    for candidate in _candidates(estimate):
        arguments = [str(part) for argument in candidate.items() for part in argument]
        with suppress(ConfigurationError, ValueError):  # else this recipe cannot be changed so
            tried.append((" ".join(arguments), plan(arguments)))
            if tried[-1][1].fits:
                break
    return tried


def _candidates(estimate: Estimate) -> Iterator[Mapping[str, Any]]:
    settings, recipe = estimate.settings, estimate.recipe
    kinds = {"none": ("selective", "block"), "selective": ("block",)}.get(recipe.checkpointing or "", ())
    counts = [settings.micro_batches * factor for factor in (2, 4, 8, 16)]
    checkpointed: list[dict[str, Any]] = [{_CHECKPOINTING: kind} for kind in kinds]
    more: list[dict[str, Any]] = [{_MICRO_BATCHES: count} for count in counts if recipe.batch_size % count == 0]
    ahead: list[dict[str, Any]] = [{_LOOKAHEAD: 0}] if settings.lookahead else []
    yield from (*checkpointed[:1], *more, *ahead, *checkpointed[1:])
    together = {name: value for part in (*checkpointed[-1:], *more[-1:], *ahead) for name, value in part.items()}
    yield together
    for factor in (2, 4, 8):
        devices = factor * recipe.devices
        stages = devices // settings.data_parallel_size
        count = {_MICRO_BATCHES: max(2 * stages, together.get(_MICRO_BATCHES, 0))} if settings.delay else {}
        # Numbers of the recipe are for as many stages as it has.
        uncut = {} if isinstance(settings.partition, str) else {_PARTITION: "auto"}
        yield {"--devices": devices, **together, **count, **uncut}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan; a recipe that cannot be run ends with code 2, one that does not fit with code 1."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with _quiet():
            estimate = estimate_of(arguments)
            changes = [] if estimate.fits else changes_of(estimate, lambda more: estimate_of([*arguments, *more]))
            content = as_json(estimate, changes)
    except (DataDependentOutputException, UnsupportedOperatorException) as error:
        _end(f"a layer or the optimizer looks at values, which tensors without memory do not have: {error}")
    except (ConfigurationError, MisconfigurationException, ValueError, TypeError) as error:
        _end(str(error))
    path = plan_parser().parse_known_args(arguments)[0].json
    print(json.dumps(content, indent=2) if path == "-" else table(content))
    if path not in (None, "-"):
        write_json(path, content)
    if not estimate.fits:
        raise SystemExit(1)


def estimate_of(arguments: Sequence[str]) -> Estimate:
    """Plan what the arguments of the command ask for."""
    parser = plan_parser()
    own, rest = parser.parse_known_args(arguments)
    recipe = build(read_configuration(["fit", *rest], parser.option_names), own.devices)
    return Estimate(recipe, device_of(own, recipe))


def _end(error: str) -> None:
    print(f"asyncpp plan: error: {error}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out remarks on the devices of this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


if __name__ == "__main__":
    main()

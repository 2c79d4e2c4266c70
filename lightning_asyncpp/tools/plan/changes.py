"""What to change in a recipe that does not fit, tried one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.tools.plan.estimate import Estimate

_CHECKPOINTING = "activation_checkpointing"


@dataclass(frozen=True)
class Change:
    """A change, as arguments of the command, and what becomes of the recipe."""

    arguments: str
    estimate: Estimate


def changes_of(estimate: Estimate) -> list[Change]:
    """Try changes, those that cost least first; end with the first that is enough."""
    tried: list[Change] = []
    for changes in _candidates(estimate):
        try:
            tried.append(changed(estimate, changes))
        except (ConfigurationError, ValueError):
            continue  # this recipe cannot be changed so
        if tried[-1].estimate.fits:
            break
    return tried


def _candidates(estimate: Estimate) -> Iterator[dict[str, Any]]:
    settings, recipe = estimate.settings, estimate.recipe
    counts = [settings.micro_batches * factor for factor in (2, 4, 8, 16)]
    more: list[dict[str, Any]] = [{"micro_batches": count} for count in counts if recipe.batch_size % count == 0]
    without_lookahead: list[dict[str, Any]] = [{"lookahead": 0}] if settings.lookahead else []
    in_bf16 = str(recipe.trainer.precision) == "bf16-mixed" and settings.compute_dtype is None
    kinds = {"none": ("selective", "block"), "selective": ("block",)}.get(recipe.argument(_CHECKPOINTING), ())
    checkpointed: list[dict[str, Any]] = [{_CHECKPOINTING: kind} for kind in kinds]
    yield from [*checkpointed[:1], *more, *without_lookahead, *([{"weight_dtype": "bf16"}] if in_bf16 else [])]
    yield from checkpointed[1:]
    together: dict[str, Any] = {}
    for part in (*checkpointed[-1:], *without_lookahead, *more[-1:]):
        together |= part
    yield together
    for factor in (2, 4, 8):
        wider = {**together, "devices": estimate.devices * factor}
        # Numbers of the recipe are for as many stages as it has.
        wider |= {} if isinstance(settings.partition, str) else {"partition": "auto"}
        stages = estimate.devices * factor // settings.data_parallel_size
        wider |= {"micro_batches": max(2 * stages, together.get("micro_batches", 0))} if settings.delay else {}
        yield wider


def changed(estimate: Estimate, changes: dict[str, Any]) -> Change:
    """Change a recipe's activation checkpointing, number of devices and settings of its pipeline."""
    settings = dict(changes)
    recipe, devices = estimate.recipe, settings.pop("devices", estimate.devices)
    arguments = {} if devices == estimate.devices else {"--devices": devices}
    if _CHECKPOINTING in settings:
        kind = settings.pop(_CHECKPOINTING)
        recipe, arguments[f"--model.init_args.{_CHECKPOINTING}"] = recipe.with_argument(_CHECKPOINTING, kind), kind
    arguments |= {f"--trainer.strategy.init_args.{name}": value for name, value in settings.items()}
    machine = estimate.machine.shared_by(devices, estimate.devices)
    made = Estimate(recipe, replace(estimate.asked, **settings), devices, machine)
    return Change(" ".join(f"{name} {value}" for name, value in arguments.items()), made)

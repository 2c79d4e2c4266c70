"""What to change in a recipe that does not fit, tried one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.tools.plan.estimate import Estimate


@dataclass(frozen=True)
class Change:
    """A change, and what becomes of the recipe.

    Attributes:
        arguments: of the command, name -> value.
        estimate: of the changed recipe.
    """

    arguments: dict[str, str]
    estimate: Estimate

    def __str__(self) -> str:
        return " ".join(f"{name} {value}" for name, value in self.arguments.items())


Attempt = Callable[[Estimate], Change | None]


def changes_of(estimate: Estimate) -> list[Change]:
    """Try changes, those that cost least first; end with the first that is enough."""
    tried: list[Change] = []
    for attempt in _attempts():
        try:
            change = attempt(estimate)
        except (ConfigurationError, ValueError):
            continue  # this recipe cannot be changed so
        if change is not None and all(change.arguments != other.arguments for other in tried):
            tried.append(change)
            if change.estimate.fits:
                break
    return tried


def _attempts() -> Iterator[Attempt]:
    yield _checkpointing("selective")
    yield _more_micro_batches
    yield _without_lookahead
    yield _bf16_versions
    yield _checkpointing("block")
    yield _together(_checkpointing("block"), _without_lookahead, _more_micro_batches)
    for factor in (2, 4, 8):
        yield _together(_more_devices(factor), _checkpointing("block"), _without_lookahead, _more_micro_batches)


def _with_settings(estimate: Estimate, **changes: Any) -> Change:
    changed = Estimate(estimate.recipe, replace(estimate.asked, **changes), estimate.devices, estimate.machine)
    return Change(_arguments(estimate, changes), changed)


def _arguments(estimate: Estimate, changes: dict[str, Any]) -> dict[str, str]:
    """Return settings as arguments; a strategy that the recipe names in short takes none."""
    given = {f"--trainer.strategy.init_args.{name}": str(value) for name, value in changes.items()}
    if given and isinstance(estimate.recipe.config["trainer"]["strategy"], str):
        kind = "AsyncPipelineStrategy" if estimate.asked.delay else "SyncPipelineStrategy"
        return {"--trainer.strategy": f"lightning_asyncpp.{kind}", **given}
    return given


def _checkpointing(kind: str) -> Attempt:
    kinds = ("none", "selective", "block")  # from the one that keeps most

    def attempt(estimate: Estimate) -> Change | None:
        now = estimate.recipe.argument("activation_checkpointing")
        if now not in kinds or kinds.index(now) >= kinds.index(kind):
            return None
        recipe = estimate.recipe.with_argument("activation_checkpointing", kind)
        changed = Estimate(recipe, estimate.asked, estimate.devices, estimate.machine)
        return Change({"--model.init_args.activation_checkpointing": kind}, changed)

    return attempt


def _more_micro_batches(estimate: Estimate) -> Change | None:
    """Double their number until it is enough, or a microbatch has one sample."""
    count, change = estimate.settings.micro_batches, None
    while (change is None or not change.estimate.fits) and estimate.recipe.batch_size % (2 * count) == 0:
        count *= 2
        change = _with_settings(estimate, micro_batches=count)
    return change


def _without_lookahead(estimate: Estimate) -> Change | None:
    return _with_settings(estimate, lookahead=0) if estimate.settings.lookahead else None


def _bf16_versions(estimate: Estimate) -> Change | None:
    is_mixed = str(estimate.recipe.trainer.precision) == "bf16-mixed"
    return _with_settings(estimate, weight_dtype="bf16") if is_mixed and not estimate.settings.compute_dtype else None


def _more_devices(factor: int) -> Attempt:
    def attempt(estimate: Estimate) -> Change:
        devices = estimate.devices * factor
        # The recipe's partition is for as many stages as it has, and so may its numbers be.
        needed = {} if isinstance(estimate.asked.partition, str) else {"partition": "auto"}
        stages = devices // estimate.asked.data_parallel_size
        if estimate.asked.delay and estimate.settings.micro_batches < 2 * stages:
            needed["micro_batches"] = 2 * stages
            needed["lookahead"] = 0
        machine = estimate.machine.shared_by(devices, estimate.devices)
        wider = Estimate(estimate.recipe, replace(estimate.asked, **needed), devices, machine)
        return Change({"--devices": str(devices), **_arguments(estimate, needed)}, wider)

    return attempt


def _together(*attempts: Attempt) -> Attempt:
    """Make several changes, until it is enough."""

    def attempt(estimate: Estimate) -> Change | None:
        change: Change | None = None
        for part in attempts:
            now = change.estimate if change is not None else estimate
            if not now.fits and (more := part(now)) is not None:
                change = Change({**(change.arguments if change is not None else {}), **more.arguments}, more.estimate)
        return change

    return attempt

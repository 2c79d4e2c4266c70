"""What to change when a configuration does not fit: every mend is tried, the first that is enough is advised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.schedule import largest_lookahead
from lightning_asyncpp.tools.plan.limits import fewest_micro_batches
from lightning_asyncpp.tools.plan.question import Question


@dataclass(frozen=True)
class Mend:
    """A change, and what becomes of the configuration.

    Attributes:
        change: as arguments of the command.
        cost: what it costs, in words.
        most: bytes of the stage that needs most.
        fits: whether that is little enough.
        step: predicted seconds per update.
        question: the changed configuration.
    """

    change: str
    cost: str
    most: int
    fits: bool
    step: float
    question: Question


_KINDS = ("none", "selective", "block")
"""Of a module's argument ``activation_checkpointing``, from the one that keeps most."""

Changes = dict[str, str]
"""Argument of the command -> its value."""

Attempt = Callable[[Question], tuple[Changes, Question] | None]
"""From a configuration to the arguments that change it and what it becomes; None where the change means nothing."""


def mends_of(question: Question) -> list[Mend]:
    """Try the mends in their order, those that cost least first; ends with the first that fits.

    One at a time; then recomputation, micro-batches and lookahead together; then more stages, with that, too.
    """
    tried: list[Mend] = []
    for cost, attempt in _attempts():
        mend = _try(question, cost, attempt)
        if mend is not None and all(mend.change != other.change for other in tried):
            tried.append(mend)
            if mend.fits:
                break
    return tried


def _attempts() -> Iterator[tuple[str, Attempt]]:
    yield "products of matrices are kept, the rest of a block is computed twice", _checkpointing("selective")
    yield "smaller products, more messages", _more_micro_batches
    yield "latency of links is waited for", _without_lookahead
    yield "master weights; forwards and backwards no longer convert weights", _bf16_versions
    yield "every block is computed twice forward", _checkpointing("block")
    yield "both", _together("selective")
    yield "all of that", _together("block")
    yield "twice the devices", _more_stages(2)
    yield "four times the devices", _more_stages(4)
    yield "eight times the devices", _more_stages(8)


def _try(question: Question, cost: str, attempt: Attempt) -> Mend | None:
    try:
        made = attempt(question)
        if made is None:
            return None
        changes, changed = made
        change = " ".join(f"{name} {value}" for name, value in changes.items())
        return Mend(change, cost, changed.most, changed.fits, changed.speed.step, changed)
    except (ConfigurationError, ValueError):
        return None  # this recipe cannot be changed so


def _with_settings(question: Question, **changes: object) -> tuple[Changes, Question]:
    return _of_strategy(question, changes), question.with_settings(**changes)


def _of_strategy(question: Question, changes: dict[str, Any]) -> Changes:
    """As arguments; a strategy that the recipe names in short takes none."""
    given = {f"--trainer.strategy.init_args.{name}": str(value) for name, value in changes.items()}
    if given and isinstance(question.recipe.config["trainer"]["strategy"], str):
        kind = "AsyncPipelineStrategy" if question.settings.delay else "SyncPipelineStrategy"
        return {"--trainer.strategy": f"lightning_asyncpp.{kind}", **given}
    return given


def _checkpointing(kind: str) -> Attempt:
    def attempt(question: Question) -> tuple[Changes, Question] | None:
        now = question.recipe.argument("activation_checkpointing")
        if now not in _KINDS or _KINDS.index(now) >= _KINDS.index(kind):
            return None
        recipe = question.recipe.with_argument("activation_checkpointing", kind)
        changed = Question(recipe, question.asked, question.devices, question.room)
        return {"--model.init_args.activation_checkpointing": kind}, changed

    return attempt


def _more_micro_batches(question: Question) -> tuple[Changes, Question] | None:
    """As few more as it takes, or as many as there are samples."""
    enough = fewest_micro_batches(question) or question.batch_size
    return _with_settings(question, micro_batches=enough) if enough > question.micro_batches else None


def _without_lookahead(question: Question) -> tuple[Changes, Question] | None:
    if question.settings.delay == 0 or question.settings.lookahead == 0:
        return None
    return _with_settings(question, lookahead=0)


def _bf16_versions(question: Question) -> tuple[Changes, Question] | None:
    mixed = str(question.recipe.trainer.precision) == "bf16-mixed"
    if not mixed or question.settings.compute_dtype is not None:
        return None
    return _with_settings(question, weight_dtype="bf16")


def _together(kind: str) -> Attempt:
    def attempt(question: Question) -> tuple[Changes, Question] | None:
        changes: Changes = {}
        parts = 0
        for part in (_checkpointing(kind), _without_lookahead, _more_micro_batches):
            if (made := part(question)) is not None:
                changes |= made[0]
                question = made[1]
                parts += 1
        return (changes, question) if parts > 1 else None

    return attempt


def _more_stages(factor: int) -> Attempt:
    def attempt(question: Question) -> tuple[Changes, Question] | None:
        devices = question.devices * factor
        if (needed := _needed_for(question, devices)) is None:
            return None
        room = question.room.shared_by(devices, question.devices)
        wider = Question(question.recipe, replace(question.asked, **needed), devices, room)
        changes = {"--devices": str(devices)} | _of_strategy(question, needed)
        if not wider.fits and (more := _together("block")(wider)) is not None:
            return changes | more[0], more[1]
        return changes, wider

    return attempt


def _needed_for(question: Question, devices: int) -> dict[str, Any] | None:
    """Settings that must be others with more devices; None if the batch has too few samples for so many stages."""
    settings = question.asked
    changes: dict[str, Any] = {}
    stages = devices // settings.data_parallel_size
    parts = question.micro_batches
    if settings.delay and parts < stages:
        enough = (m for m in range(stages, question.batch_size + 1) if question.batch_size % m == 0)
        if (parts := next(enough, 0)) == 0:
            return None
        changes["micro_batches"] = parts
    if not isinstance(settings.partition, str):
        changes["partition"] = "auto"  # the recipe's is for as many stages as it has
    most = largest_lookahead(stages, parts, settings.data_parallel_size)
    if settings.delay and settings.lookahead is not None and min(settings.lookahead, stages - 1) > most:
        changes["lookahead"] = most
    return changes

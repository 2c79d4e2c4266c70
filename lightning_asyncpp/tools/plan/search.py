"""How far a configuration can be stretched before it does not fit any more, and what to change if it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_asyncpp.core.schedule import largest_lookahead
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.tools.plan.question import Question

MOST_SAMPLES = 2**16
"""Samples per micro-batch up to which is searched."""


@dataclass(frozen=True)
class Limits:
    """The most that fits, everything else left as it is; None where nothing does.

    Attributes:
        lookahead: largest lookahead that is of use and fits; None without a delay as well.
        micro_batches: smallest number of micro-batches that the batch can be cut into evenly.
        samples: largest number of samples per micro-batch, with as many micro-batches; 65,536 may stand for more.
    """

    lookahead: int | None
    micro_batches: int | None
    samples: int | None


def limits_of(question: Question) -> Limits:
    """Search; every answer was looked at itself, none is extrapolated."""
    return Limits(_lookahead(question), fewest_micro_batches(question), _samples(question))


def _lookahead(question: Question) -> int | None:
    settings = question.settings
    if settings.delay == 0:
        return None
    most = largest_lookahead(settings.num_stages, settings.micro_batches, settings.data_parallel_size)
    fitting = (c for c in range(most, -1, -1) if question.with_settings(lookahead=c).fits)
    return next(fitting, None)


def fewest_micro_batches(question: Question) -> int | None:
    """The smallest number of equal micro-batches with which the batch fits: memory falls with their number."""
    found, candidates = None, [m for m in _divisors(question.batch_size) if _can_be_run(question, m)]
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        if question.with_settings(micro_batches=candidates[middle]).fits:
            found, high = candidates[middle], middle
        else:
            low = middle + 1
    return found


def _samples(question: Question) -> int | None:
    parts = question.micro_batches
    return largest_within(lambda size: question.with_batch(size * parts).most, question.room.bytes, MOST_SAMPLES)


def largest_within(need: Callable[[int], float], room: float, most: int) -> int | None:
    """The largest whole number from 1 to ``most`` whose need fits the room; None if 1 does not.

    Args:
        need: never falls. Memory is nearly a line over the number of samples, so the next guess is where a line through
            two answers meets the room; where the last one gained little, the middle of what is left.
        room: what there is.
        most: where the search ends.
    """
    known = {1: need(1)}
    fits, beyond, guess = 1, most + 1, 2
    if known[1] > room:
        return None
    while beyond - fits > 1:
        left = beyond - fits
        known[guess] = need(guess)
        fits, beyond = (guess, beyond) if known[guess] <= room else (fits, guess)
        if beyond in known and 2 * (beyond - fits) > left:
            guess = (fits + beyond) // 2
        else:
            guess = max(fits + 1, min(_on_line(known, fits, beyond, room), beyond - 1))
    return fits


def _on_line(known: dict[int, float], fits: int, beyond: int, room: float) -> int:
    """Where the line through the two answers around the room, or the last two below it, meets it."""
    other = beyond if beyond in known else max((size for size in known if size < fits), default=fits)
    if known[other] == known[fits]:
        return beyond
    return fits + int((room - known[fits]) * (other - fits) / (known[other] - known[fits]))


def _can_be_run(question: Question, micro_batches: int) -> bool:
    try:
        question.with_settings(micro_batches=micro_batches)
    except ConfigurationError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


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
        kind = "AsyncPipelineStrategy" if question.asked.delay else "SyncPipelineStrategy"
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
    if settings.delay and settings.lookahead is not None and settings.lookahead > most:
        changes["lookahead"] = most
    return changes

"""How far a configuration can be stretched before it does not fit any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.schedule import largest_lookahead
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

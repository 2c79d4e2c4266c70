"""Fault scenarios drawn from a seed: which fault occurs in which job, where and when."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.faults.jobs import JOBS, Job
from tests.faults.places import MISTAKE, Fault

USERS = ("forward", "backward", "step", "optimizer", "loader", "callback", "evaluation", "save")
ANYWHERE = ("call", "call", "call", "storage", *USERS)
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("kill", ANYWHERE),
    ("raise", USERS),
    ("kill", ("storage",)),
    ("term", ("call",)),
    ("stop", ANYWHERE),
    ("full", ("disk",)),
    ("memory", USERS),
    ("nan", ("forward", "backward")),
    ("kill", ("call",)),
    ("leave", ANYWHERE),
    ("raise", ("save", "callback", "evaluation")),
    ("cut", ("call",)),
    ("raise", ("loader", "optimizer", "step")),
    ("small", ()),
)
"""Kinds of faults, each with the places where it may occur; ``small`` is a small disk, which a save finds full."""

QUICK = ("behind", "fabric")
"""Jobs of the first scenario of each kind, two of which the default tests run."""
GONE = ("kill", "leave", "stop", "cut")
ERRORS = ("raise", "full", "memory", "nan")
TOLD = ("term",)


@dataclass(frozen=True)
class Scenario:
    """Fault scenario of one seed.

    Attributes:
        job: job in which the fault occurs.
        what, places: kind of fault, and places by preference: it occurs at the first place that any rank passes.
        share: share of the rank's visits to the place that come before the fault, from 0 to 1.
        seed: number of the scenario; also the seed from which the rank is drawn.
    """

    seed: int
    job: Job
    what: str
    places: tuple[str, ...]
    share: float

    def __str__(self) -> str:
        return f"{self.seed}-{self.job.name}-{self.what}"

    def fault(self, counts: list[dict[str, int]], process: int = 0) -> Fault:
        """Return the fault, given how often each rank of an undisturbed run passes each place."""
        rng = random.Random(self.seed)
        for place in self.places:
            ranks = [rank for rank, passed in enumerate(counts) if passed.get(place)]
            if ranks:
                rank = rng.choice(ranks)
                return Fault(self.what, place, rank, int(self.share * counts[rank][place]), process)
        raise ValueError(f"{self}: no rank passes {self.places}")


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed; ``len(KINDS)`` consecutive seeds contain every kind of fault once."""
    rng = random.Random(1306 + seed)  # with this offset, the default scenarios use both jobs
    what, places = KINDS[seed % len(KINDS)]
    jobs = QUICK if seed < len(KINDS) else JOBS
    job = rng.choice([JOBS[name] for name in jobs if _can_be(JOBS[name], what)])
    return Scenario(seed, job, what, (*rng.sample(places, len(places)), "call"), rng.random())


def _can_be(job: Job, what: str) -> bool:
    by_trainer = not job.name.startswith("fabric")
    if what in TOLD or what == "small":
        return by_trainer  # a user's own loop defines its own reaction, and keeps only the newest checkpoint
    if what == "cut":
        return by_trainer and job.processes == 2
    return True


MISTAKES = {
    "raise": MISTAKE, "full": "could not be written", "small": "could not be written",
    "memory": "can't allocate memory", "nan": "NaN or Inf",
}  # fmt: skip
"""Text of the errors that a fault leads to."""

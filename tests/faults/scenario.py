"""What goes wrong in which job, where and when, drawn from a seed."""

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
"""What happens, and where it can; ``small`` is a small disk, which some save finds full."""

QUICK = ("behind", "fabric")
"""The jobs of the first of each sort, which the default tests run."""
GONE = ("kill", "leave", "stop", "cut")
ERRORS = ("raise", "full", "memory", "nan")
TOLD = ("term",)


@dataclass(frozen=True)
class Scenario:
    """One of them.

    Attributes:
        job: in which job.
        what, places: what happens, and where: in the first of the places that the rank passes.
        share: how far through all the times that a place is passed, from 0 to 1.
        seed: which one this is; also draws the rank.
    """

    seed: int
    job: Job
    what: str
    places: tuple[str, ...]
    share: float

    def __str__(self) -> str:
        return f"{self.seed}-{self.job.name}-{self.what}"

    def fault(self, counts: list[dict[str, int]], process: int = 0) -> Fault:
        """What goes wrong, once it is known how often each rank of an undisturbed run passes each place."""
        rng = random.Random(self.seed)
        for place in self.places:
            ranks = [rank for rank, passed in enumerate(counts) if passed.get(place)]
            if ranks:
                rank = rng.choice(ranks)
                return Fault(self.what, place, rank, int(self.share * counts[rank][place]), process)
        raise ValueError(f"{self}: no rank passes {self.places}")


def draw(seed: int) -> Scenario:
    """The scenario of a seed; every sort of fault comes once in as many as there are."""
    rng = random.Random(1306 + seed)  # so that the default ones are of both jobs
    what, places = KINDS[seed % len(KINDS)]
    jobs = QUICK if seed < len(KINDS) else JOBS
    job = rng.choice([JOBS[name] for name in jobs if _can_be(JOBS[name], what)])
    return Scenario(seed, job, what, (*rng.sample(places, len(places)), "call"), rng.random())


def _can_be(job: Job, what: str) -> bool:
    by_trainer = not job.name.startswith("fabric")
    if what in TOLD or what == "small":
        return by_trainer  # what a loop of the user's own does then, is its own; it keeps its newest checkpoint alone
    if what == "cut":
        return by_trainer and job.processes == 2
    return True


MISTAKES = {
    "raise": MISTAKE, "full": "could not be written", "small": "could not be written",
    "memory": "can't allocate memory", "nan": "NaN or Inf",
}  # fmt: skip
"""What errors say."""

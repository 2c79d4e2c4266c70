"""How much of the time that messages take a schedule hides: exactly for constant depths, by simulation for any order.

    python -m research.theory.slack          the tables of research/notes/performance.md, a minute

Times are in units of a forward; a backward takes two. An order is given by leads: ``leads[s][j]`` is the number of
forwards beyond microbatch j of a mini-batch that stage s has done when its backward comes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from lightning_asyncpp.core.schedule import Action, Kind, depth

FORWARD, BACKWARD = 1.0, 2.0
WORK = FORWARD + BACKWARD
Leads = Sequence[Sequence[int]]

# Eight stages, eight microbatches: found by a solver, then trimmed to fewer activations. The extra microbatches in
# flight travel from the first stage to the last.
TRAVELLING: Leads = (
    (9, 9, 9, 10, 10, 9, 9, 8),
    (7, 8, 8, 8, 9, 8, 8, 7),
    (6, 6, 7, 7, 7, 7, 7, 6),
    (5, 5, 4, 6, 6, 6, 5, 5),
    (4, 4, 3, 3, 5, 5, 4, 4),
    (3, 2, 2, 2, 2, 2, 3, 3),
    (2, 1, 1, 1, 1, 1, 1, 2),
    (0, 0, 0, 0, 0, 0, 0, 0),
)


def at_the_end(num_stages: int, extra: int) -> list[int]:
    """Depths whose extra microbatches give slack to the last hops."""
    return [behind + min(behind, extra) for behind in reversed(range(num_stages))]


def spread(num_stages: int, extra: int) -> list[int]:
    """Depths of the package: extra microbatches leave runs of hops without slack of about the same length."""
    return [depth(stage, num_stages, extra) for stage in range(num_stages)]


def period(depths: Sequence[int], hop: float) -> float:
    """Time per microbatch of constant depths: the largest mean of all cycles of actions that wait for each other.

    A simple cycle goes forward from stage a to b, turns, comes back, and meets itself where the depths have it: it
    takes the work of all its stages and the hops both ways, and gets on by the difference of the depths and one.
    """
    stages = range(len(depths))
    return max(
        ((b - a + 1) * WORK + 2 * (b - a) * hop) / (depths[a] - depths[b] + 1) for a in stages for b in stages[a:]
    )


def actions_of(leads: Sequence[int], mini_batches: int) -> list[Action]:
    """A stage's list: update t - 1 before the forwards of mini-batch t + 1."""
    count, oldest, actions = len(leads), 0, []
    for k in range(mini_batches * count):
        t = k // count
        if k % count == 0 and t >= 2:
            actions.append(Action(Kind.UPDATE, t - 2))
        actions.append(Action(Kind.FORWARD, k))
        while oldest <= k and k >= oldest + leads[oldest % count]:
            actions.append(Action(Kind.BACKWARD, oldest))
            oldest += 1
    actions += [Action(Kind.BACKWARD, k) for k in range(oldest, mini_batches * count)]
    return actions + [Action(Kind.UPDATE, t) for t in range(max(mini_batches - 2, 0), mini_batches)]


def in_flight(leads: Sequence[int]) -> int:
    """The most microbatches between their forward and their backward."""
    return max(lead + 1 for lead in leads)


def utilisation(leads: Leads, hop: float, spread_of_work: float = 0.0, seed: int = 0) -> float:
    """Share of the time in which stages work, over the second half of a long run.

    Args:
        leads: the order.
        hop: time of a message, also of the first stage's word that an update is agreed on.
        spread_of_work: standard deviation of the logarithm of an action's time, which keeps its mean.
        seed: of those times.
    """
    count = len(leads[0])
    mini_batches = max(24, 1200 // count)
    generator = random.Random(seed)
    offset = -spread_of_work * spread_of_work / 2

    def time_of(kind: Kind) -> float:
        factor = math.exp(generator.gauss(offset, spread_of_work)) if spread_of_work else 1.0
        return factor * {Kind.FORWARD: FORWARD, Kind.BACKWARD: BACKWARD, Kind.UPDATE: 0.0}[kind]

    ends = run([actions_of(row, mini_batches) for row in leads], count, hop, time_of)
    begin, end = mini_batches // 2, mini_batches - 4
    return (end - begin) * count * WORK / (ends[end] - ends[begin])


def run(
    lists: Sequence[Sequence[Action]], microbatches: int, hop: float, time_of: Callable[[Kind], float]
) -> list[float]:
    """Run lists; returns when the gradient of each mini-batch was complete on the first stage."""
    todo = [list(actions)[::-1] for actions in lists]
    clocks = [0.0] * len(lists)
    done: dict[tuple[int, Kind, int], float] = {}
    left = -1
    while left != (left := sum(map(len, todo))):
        for stage, actions in enumerate(todo):
            while actions and (ready := _ready(done, stage, len(lists), actions[-1], microbatches, hop)) is not None:
                action = actions.pop()
                clocks[stage] = max(clocks[stage], ready) + time_of(action.kind)
                done[stage, action.kind, action.index] = clocks[stage]
    assert left == 0, "deadlock"
    count = sum(kind is Kind.UPDATE and stage == 0 for stage, kind, _ in done)
    return [done[0, Kind.BACKWARD, (t + 1) * microbatches - 1] for t in range(count)]


def _ready(
    done: dict[tuple[int, Kind, int], float],
    stage: int,
    num_stages: int,
    action: Action,
    microbatches: int,
    hop: float,
) -> float | None:
    """Return when the inputs of an action are there, or None."""
    kind, k = action.kind, action.index
    if kind is Kind.UPDATE:  # the first stage completes last, and tells the others
        end = done.get((0, Kind.BACKWARD, (k + 1) * microbatches - 1))
        return None if end is None else end + (hop if stage else 0.0)
    peer = stage - 1 if kind is Kind.FORWARD else stage + 1
    if not 0 <= peer < num_stages:
        return 0.0
    end = done.get((peer, kind, k))
    return None if end is None else end + hop


def _row(name: str, leads: Leads, hops: Sequence[float], exact: Sequence[float]) -> str:
    jittery = [sum(utilisation(leads, hop * WORK, 0.2, seed) for seed in range(3)) / 3 for hop in hops]
    numbers = " | ".join(f"{value:.3f}" for value in [*exact, *jittery])
    memory = [in_flight(row) for row in leads]
    return f"| {name} | {memory[0]}, {sum(memory)} | {numbers} |"


def _constant(depths: Sequence[int], microbatches: int) -> Leads:
    return [[d] * microbatches for d in depths]


def main() -> None:
    """Print the tables."""
    stages, hops = 8, (0.01, 0.02, 0.05, 0.1)
    for microbatches in (8, 12, 16, 32):
        print(f"\n{microbatches} microbatches; hops of {hops} of a microbatch's work, and again with jitter")
        for extra in range(stages):
            for place in (at_the_end, spread):
                depths = place(stages, extra)
                if depths[0] <= microbatches:
                    exact = [WORK / period(depths, hop * WORK) for hop in hops]
                    name = f"{place.__name__} {extra}"
                    print(_row(name, _constant(depths, microbatches), hops, exact), flush=True)
    print(_row("travelling, 8 microbatches", TRAVELLING, hops, [utilisation(TRAVELLING, h * WORK) for h in hops]))


if __name__ == "__main__":
    main()

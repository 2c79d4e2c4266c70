"""Schedules as pure lists of actions: PipeDream-2BW without a flush, and 1F1B with one per mini-batch.

Micro-batches are counted over the whole run: with ``m`` of them per mini-batch, micro-batch ``k`` belongs to
mini-batch ``t = k // m``. A stage keeps its forwards ``depth`` micro-batches ahead of its backwards,

    depth(s) = (P - 1 - s) + (P - 1 - s) * (lookahead + 1) // P,

which strictly decreases with the stage, so that every gradient a stage waits for is already under way. A hop between
neighbours whose depths differ by one has no slack: its latency is waited for. Where they differ by two, the gradient is
under way while something else is computed. What a run of hops without slack costs grows with its length, so the extra
micro-batches are spread evenly over the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """What a stage does."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"


@dataclass(frozen=True)
class Action:
    """One step of a stage: ``F k`` and ``B k`` count micro-batches, ``U t`` counts mini-batches."""

    kind: Kind
    index: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.index}"


def depth(stage: int, num_stages: int, lookahead: int) -> int:
    """Number of micro-batches by which the forwards of ``stage`` run ahead of its backwards.

    More lookahead than P - 1 has nothing left to hide.
    """
    behind = num_stages - 1 - stage
    return behind + behind * (min(lookahead, num_stages - 1) + 1) // num_stages


def largest_lookahead(num_stages: int, micro_batches: int, num_replicas: int) -> int:
    """Largest useful lookahead of an asynchronous pipeline; negative if not even 0 fits.

    The first stage may run ``micro_batches`` ahead, one less with replicas: their gradient reduction needs somewhere to
    hide.
    """
    room = micro_batches - (1 if num_replicas > 1 else 0) - (num_stages - 1)
    return min(room, num_stages - 1)


def weight_version(mini_batch: int, delay: int, synchronous_start: int = 0) -> int:
    """Number v of the weights W_v that mini-batch t runs on, forward and backward: W_{max(t - delay, N)}.

    Before it, in a synchronous start of N mini-batches, W_t. Mini-batches N and N + 1 both run on W_N, as 0 and 1 do on
    W_0 without such a start.

    Args:
        mini_batch: t.
        delay: updates between the weights of a gradient and the weights that it is applied to.
        synchronous_start: N.
    """
    return mini_batch if mini_batch < synchronous_start else max(mini_batch - delay, synchronous_start)


def updates_behind(mini_batch: int, delay: int, synchronous_start: int = 0) -> int:
    """How many mini-batches' updates are outstanding when mini-batch t was run: none after a flush.

    Arguments as for :func:`weight_version`.
    """
    return delay if mini_batch >= synchronous_start else 0


@dataclass(frozen=True)
class Schedule:
    """The order of forwards and backwards on one stage.

    Attributes:
        stage: position in the pipeline, 0 first.
        num_stages: number of stages P.
        lookahead: extra micro-batches in flight; hides latency, costs activation memory, never changes the delay.
        delay: updates between the weights of a gradient and the weights that it is applied to: 1 (PipeDream-2BW) or 0.
        synchronous_start: number of mini-batches at the beginning that end with a flush and have no delay.
    """

    stage: int
    num_stages: int
    lookahead: int = 0
    delay: int = 1
    synchronous_start: int = 0

    @property
    def depth(self) -> int:
        """Number of micro-batches by which forwards run ahead of backwards here."""
        return depth(self.stage, self.num_stages, self.lookahead)

    def batch(self, first: int, count: int, oldest: int) -> Iterator[Action]:
        """Actions that bring ``count`` micro-batches from ``first`` on under way.

        Args:
            first: index of the first new micro-batch.
            count: number of new micro-batches.
            oldest: the micro-batch whose backward is due next.
        """
        depth = self.depth
        for k in range(first, first + count):
            yield Action(Kind.FORWARD, k)
            while k + 1 - oldest > depth:
                yield Action(Kind.BACKWARD, oldest)
                oldest += 1

    def drain(self, oldest: int, end: int) -> Iterator[Action]:
        """Backwards of everything in flight: micro-batches ``oldest`` to ``end - 1``."""
        return (Action(Kind.BACKWARD, k) for k in range(oldest, end))

    def weight_version(self, mini_batch: int) -> int:
        """Weights that mini-batch t runs on, forward and backward: see :func:`weight_version`."""
        return weight_version(mini_batch, self.delay, self.synchronous_start)

    def updates_behind(self, mini_batch: int) -> int:
        """How many mini-batches' updates are outstanding: see :func:`updates_behind`."""
        return updates_behind(mini_batch, self.delay, self.synchronous_start)

    def run(self, mini_batches: int, micro_batches: int) -> list[Action]:
        """The whole run, as planners, simulators and drawings want it: the engine executes the same order.

        Update t - delay follows the forwards of mini-batch t; what is still in flight is drained at the end.
        """
        actions: list[Action] = []
        oldest = updates = 0
        for t in range(mini_batches):
            actions += self.batch(t * micro_batches, micro_batches, oldest)
            oldest = max(oldest, (t + 1) * micro_batches - self.depth)
            if self.updates_behind(t) == 0:
                actions += self.drain(oldest, (t + 1) * micro_batches)
                oldest = (t + 1) * micro_batches
            due = t + 1 - self.updates_behind(t)
            actions += [Action(Kind.UPDATE, u) for u in range(updates, due)]
            updates = max(updates, due)
        actions += self.drain(oldest, mini_batches * micro_batches)
        actions += [Action(Kind.UPDATE, u) for u in range(updates, mini_batches)]
        return actions

"""Gradients of parameters that layers of several stages share.

Each of these stages holds a copy and steps it by itself. All step with the same gradient, the sum over all uses, so
that the copies stay equal, bitwise. It is summed in the background, after the last backward of a mini-batch and before
its update: the last stage that holds the parameter, whose gradient is complete first, sends it to the one before among
them, which adds its own, and so on; the first one, whose gradient is complete last, has the sum, counts it in the norm
and sends it to all others. So uses are added from the last layer to the first, on any number of stages, and nobody who
adds waits for a stage before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_asyncpp.core.cut.ties import Tie, names_on
from lightning_asyncpp.core.host_copies import HostCopy, empty_on_host
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.ranks.process_groups import HostWork
from lightning_asyncpp.core.updates.reduction import Bucket, Gradients
from lightning_asyncpp.errors import lost_peers

_TAG = 5
_MOST_TAGS = 16  # of other messages
_MOST_MINI_BATCHES = 8  # under way at a time, and more


class TiedGradients:
    """The gradients of one mini-batch that this stage shares with others.

    Args:
        mesh: this rank's place, connected.
        ties: of this stage.
        parameters: name -> parameter of this stage.
        tags: of the messages of each tie, others than those of mini-batches that may be under way meanwhile: from a GPU
            messages leave as soon as they have come to the host, in any order.

    Attributes:
        names: of the parameters on this stage.
        counted_by_others: those of them that another stage counts in the norm of the gradient.
    """

    def __init__(self, mesh: Mesh, ties: Sequence[Tie], parameters: dict[str, Tensor], tags: Sequence[int]) -> None:
        self.names = names_on(mesh.stage, ties)
        self.counted_by_others = names_on(mesh.stage, [tie for tie in ties if tie.stages[0] != mesh.stage])
        self._mesh, self._ties, self._parameters, self._tags = mesh, ties, parameters, tags
        self._buckets = [Bucket([tie.name_on(mesh.stage)], parameters) for tie in ties]
        # Posted before anybody sends: what comes need not be stored on its way. Between two ranks all in the same
        # order: sums of the stages behind travel one way, whole sums the other.
        with lost_peers():
            self._from_behind = [self._receive(n, tie.behind(mesh.stage)) for n, tie in enumerate(ties)]
            firsts = [None if tie.before(mesh.stage) is None else tie.stages[0] for tie in ties]
            self._whole = [self._receive(n, first) for n, first in enumerate(firsts)]
        self._sends: list[HostWork] = []
        self._passed_on = False

    def have_arrived(self) -> bool:
        """Whether the sums of the stages behind are there, so that :meth:`pass_on` need not wait."""
        return all(received is None or received.work.is_completed() for received in self._from_behind)

    def has_whole_sums(self) -> bool:
        """Whether :meth:`take_whole_sums` need not wait, nor :meth:`pass_on` before it."""
        return self.have_arrived() and all(whole is None or whole.work.is_completed() for whole in self._whole)

    def pass_on(self, gradients: Gradients, uses: Mapping[str, Sequence[Tensor]]) -> None:
        """Add this stage's gradients to the sums of the stages behind, waiting for these, and send them on; once.

        Args:
            gradients: name -> gradient; of parameters that this stage counts the whole sums replace them.
            uses: name -> the gradients of several uses on this stage, in the order in which they are to be added.
        """
        if self._passed_on:
            return
        self._passed_on = True
        for number, (tie, bucket) in enumerate(self._pairs()):
            name = tie.name_on(self._mesh.stage)
            own = uses[name] if name in uses else [g for g in (gradients[name],) if g is not None]
            total = _sum_onto(self._taken(self._from_behind, number), own)
            before = tie.before(self._mesh.stage)
            if before is None:
                gradients[name] = total
            self._send(number, bucket.pack({name: total}), tie.stages[1:] if before is None else (before,))

    def take_whole_sums(self, gradients: Gradients) -> None:
        """Replace this stage's gradients by the sums over all stages, waiting for those that others count.

        Args:
            gradients: name -> gradient; entries are replaced.
        """
        for number, tie in enumerate(self._ties):
            if tie.before(self._mesh.stage) is not None:
                gradients[tie.name_on(self._mesh.stage)] = self._taken(self._whole, number)

    def have_left(self) -> bool:
        """Whether nothing of what was sent is on its way; it is let go of then."""
        self._sends = [work for work in self._sends if not work.is_completed()]
        return not self._sends

    def settle(self) -> None:
        """Wait until what was sent has left."""
        with lost_peers():
            for work in self._sends:
                work.wait()
        self._sends = []

    def _pairs(self) -> Iterator[tuple[Tie, Bucket]]:
        return zip(self._ties, self._buckets)

    def _receive(self, number: int, stage: int | None) -> _Received | None:
        if stage is None:
            return None
        like = self._parameters[self._buckets[number].names[0]]
        flat = empty_on_host(like.numel() + 1, like)
        return _Received(self._mesh.receive(flat, self._mesh.rank_of(stage), self._tags[number]), flat)

    def _taken(self, received: list[_Received | None], number: int) -> Tensor | None:
        """A gradient that was received, waiting for it; it is let go of, being as large as the parameter."""
        arriving, received[number] = received[number], None
        if arriving is None:
            return None
        with lost_peers():
            arriving.work.wait()
        bucket = self._buckets[number]
        (gradient,) = bucket.unpack(arriving.flat).values()
        return None if gradient is None else gradient.to(bucket.device, non_blocking=True)

    def _send(self, number: int, flat: Tensor, stages: Sequence[int]) -> None:
        copy = HostCopy(flat)
        with lost_peers():
            self._sends += [self._mesh.send(copy, self._mesh.rank_of(stage), self._tags[number]) for stage in stages]


class _Received(NamedTuple):
    """A gradient on its way here, and where it is put."""

    work: HostWork
    flat: Tensor


def _sum_onto(sum_so_far: Tensor | None, gradients: Sequence[Tensor]) -> Tensor | None:
    for gradient in gradients:
        sum_so_far = gradient if sum_so_far is None else sum_so_far + gradient
    return sum_so_far


def tags_of(ties: Sequence[Tie], whole: Sequence[Tie], mini_batch: int) -> list[int]:
    """Tags for the messages of some of a model's ties in a mini-batch, the same on all stages."""
    turn = mini_batch % _MOST_MINI_BATCHES * len(whole)
    return [_TAG + (turn + whole.index(tie)) * _MOST_TAGS for tie in ties]

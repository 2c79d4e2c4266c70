"""Sums of a mini-batch's gradients in the background: over replicas, and over stages that share a parameter.

Gradients are reduced over replicas in flat buckets. A bucket's all-reduce starts as soon as the mini-batch's last
backward has completed the bucket's gradients, while the rest of that backward runs. On the last stage all buckets are
sent after that backward, since it runs before the mini-batch is known to be complete. When :meth:`Reduction.progress`
finds a reduced bucket, its norms are computed. The host reads all norms, and which gradients exist, in one copy.

A parameter shared by several stages has a copy on each of them. Each stage updates its copy with the same gradient,
the sum over all uses, so that the copies stay bitwise equal. The gradient is summed between the last backward of a
mini-batch and its update. The last sharing stage, whose gradient is complete first, sends its gradient to the previous
sharing stage. That stage adds its gradient and sends the sum on. The first sharing stage counts the whole sum in the
norm and sends it to all other sharing stages. So on any number of stages, uses are added from the last layer to the
first, and no sum waits for an earlier stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.core.clipping import norms_of
from lightning_asyncpp.core.cut.ties import Tie, names_on
from lightning_asyncpp.core.host_copies import HostCopy, Reading
from lightning_asyncpp.core.ranks.mesh import Mesh, started
from lightning_asyncpp.core.ranks.process_groups import HostWork
from lightning_asyncpp.core.trace import HOST, Clock, Moment
from lightning_asyncpp.core.weights import sum_of
from lightning_asyncpp.errors import ConfigurationError, lost_peers

Gradients = dict[str, "Tensor | None"]
BUCKET_BYTES = 16 * 2**20
GPU_BUCKET_BYTES = 64 * 2**20
"""Larger than on CPUs, since each NCCL all-reduce is a kernel that takes a part of the GPU from the backward."""
_TAG = 5
_MOST_TAGS = 16  # distance between tags here; other modules' tags are below 16 and differ from _TAG
_MOST_MINI_BATCHES = 8  # more than are in flight at the same time
_ALIGNMENT = 64
"""Alignment of tensors that torch allocates, in bytes. Rounding of matrix products depends on the alignment of their
operands, so the alignment must not depend on the stage."""


class Bucket:
    """Gradients of one dtype, packed into a flat tensor for an all-reduce.

    The tensor ends with one flag per gradient, which says whether the gradient exists. A parameter that no replica used
    keeps the gradient None, so that the optimizer does not decay it.

    Args:
        names: names of the parameters.
        like: name -> tensor of the gradient's shape, dtype and device.
    """

    def __init__(self, names: Sequence[str], like: Mapping[str, Tensor]) -> None:
        self.names = list(names)
        self._like = like
        self._padding: list[int] = []  # elements before each gradient
        end, step = 0, max(1, _ALIGNMENT // like[self.names[0]].element_size())
        for name in self.names:
            self._padding.append(-end % step)
            end += self._padding[-1] + like[name].numel()

    @property
    def device(self) -> torch.device:
        """Device of the gradients."""
        return self._like[self.names[0]].device

    def pack(self, gradients: Mapping[str, Tensor | None]) -> Tensor:
        """Return the gradients of this bucket as a new flat tensor, with zeros for None."""
        present = [gradients[name] for name in self.names]
        pieces: list[Tensor] = []
        for name, gradient, padding in zip(self.names, present, self._padding):
            like = self._like[name]
            pieces += [like.new_zeros(padding)] if padding else []
            pieces.append(like.new_zeros(like.numel()) if gradient is None else gradient.reshape(-1))
        for there, run in itertools.groupby(gradient is not None for gradient in present):
            # Fill on the device: a copy from the host would wait for the GPU.
            pieces.append(like.new_full((len(list(run)),), float(there)))
        return torch.cat(pieces)

    def unpack(self, flat: Tensor) -> Gradients:
        """Return the summed gradients as views of ``flat``; wait for the device."""
        gradients, flags = self.views(flat)
        return {name: g if flag else None for (name, g), flag in zip(gradients.items(), flags.tolist())}

    def views(self, flat: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return views of ``flat``: summed gradients by name, and flags (names,).

        A gradient exists if its flag is not 0.
        """
        sizes = [n for name, pad in zip(self.names, self._padding) for n in (pad, self._like[name].numel())]
        *pieces, flags = flat.split([*sizes, len(self.names)])
        return {name: p.view(self._like[name].shape) for name, p in zip(self.names, pieces[1::2])}, flags


def plan_buckets(
    like: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES, complete_late: Collection[str] = ()
) -> list[Bucket]:
    """Divide parameters into buckets; the last parameter comes first, since its gradient is complete first.

    Args:
        like: name -> tensor of the gradient's shape, dtype and device, in the order of the forward.
        bucket_bytes: a bucket that has this size in bytes gets no further parameters.
        complete_late: names of parameters whose gradients are complete only after a whole backward; they get the last
            buckets.
    """
    together: dict[tuple[bool, torch.dtype], list[str]] = {}
    backwards = list(reversed(list(like)))
    for name in [n for n in backwards if n not in complete_late] + [n for n in backwards if n in complete_late]:
        together.setdefault((name in complete_late, like[name].dtype), []).append(name)
    return [Bucket(names, like) for group in together.values() for names in _parts(group, like, bucket_bytes)]


class Reduction:
    """Reduction of one mini-batch's gradient over replicas.

    Args:
        buckets: buckets of this stage's gradients, the same on all replicas, which reduce them in this order.
        group: ranks of this stage in all replicas.
        complete_late: names of parameters whose gradients are complete only after a whole backward.
        excluded_from_norm: names of parameters that are left out of ``squares``.
        clock: clock of the stage's trace, for ``started`` and ``ends``.

    Attributes:
        gradients: name -> sum over replicas, for buckets processed so far; at the end, None if no replica had a
            gradient.
        squares: name -> sum of squares of the gradient (if it exists) in fp64, once all buckets are processed.
        started: moment at which the first bucket was sent; None before.
        ends: moments at which processed buckets arrived.
        num_bytes: bytes sent.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup,
        complete_late: Collection[str] = (),
        excluded_from_norm: Collection[str] = (),
        clock: Clock = HOST,
    ) -> None:
        self.gradients: Gradients = {}
        self.squares: dict[str, float] = {}
        self.started: Moment | None = None
        self.ends: list[Moment] = []
        self.num_bytes = 0
        self._buckets, self._group, self._excluded_from_norm, self._clock = buckets, group, excluded_from_norm, clock
        self._sent: list[_Sent] = []
        self._taken = 0
        self._looked_at: list[tuple[list[str], Tensor, Tensor]] = []  # names, norms, flags
        self._reading: Reading | None = None
        self._missing = [set(bucket.names) for bucket in buckets]
        self._bucket_of = {
            name: number for number, bucket in enumerate(buckets) for name in bucket.names if name not in complete_late
        }

    @contextmanager
    def watching(self, leaves: Mapping[str, Tensor], gradient_of: Callable[[str], Tensor | None]) -> Iterator[None]:
        """Send each bucket when the last backward of the mini-batch has completed it.

        Args:
            leaves: name -> leaf tensor on which gradients accumulate.
            gradient_of: name -> gradient summed over the mini-batch.
        """
        hooks = [
            leaf.register_post_accumulate_grad_hook(lambda _, name=name: self._complete(name, gradient_of))
            for name, leaf in leaves.items()
            if name in self._bucket_of
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def send_rest(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Send the remaining buckets, such as those of late parameters, or of parameters that the backward left out."""
        while len(self._sent) < len(self._buckets):
            self._send(gradients)

    def progress(self) -> bool:
        """Process buckets that have arrived, without waiting; return whether all buckets are processed."""
        while self._taken < len(self._sent) and self._sent[self._taken].work.is_completed():
            self._process_next()
        if self._reading is not None and self._reading.is_there():
            self._read(self._reading)
        return self._taken == len(self._buckets) and self._reading is None

    def wait(self) -> None:
        """Wait for all buckets, and process them.

        Raises:
            PeerLostError: another replica is gone.
        """
        while self._taken < len(self._sent):
            self._process_next()
        if self._reading is not None:
            self._read(self._reading)

    def release(self) -> None:
        """Free all tensors, after all buckets were processed."""
        self.gradients.clear()
        self._sent.clear()

    def _complete(self, name: str, gradient_of: Callable[[str], Tensor | None]) -> None:
        number = self._bucket_of[name]
        if number < len(self._sent):
            raise ConfigurationError(
                f"the gradient of {name} changed after it was complete: a backward inside a backward added to it. This"
                " happens if torch.utils.checkpoint runs two parts that share weights; pass use_reentrant=False to"
                " torch.utils.checkpoint"
            )
        self._missing[number].discard(name)
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send({name: gradient_of(name) for name in self._buckets[len(self._sent)].names})

    def _send(self, gradients: Mapping[str, Tensor | None]) -> None:
        bucket = self._buckets[len(self._sent)]
        with torch.no_grad():
            flat = bucket.pack(gradients)
        self.started = self.started or self._clock.now()
        self.num_bytes += flat.nbytes
        with lost_peers():
            self._sent.append(_Sent(bucket, flat, self._group, self._clock))

    def _process_next(self) -> None:
        sent = self._sent[self._taken]
        with lost_peers():
            sent.work.wait()
        self.ends.append(sent.ended or self._clock.now())
        gradients, flags = sent.bucket.views(sent.flat)
        self.gradients.update(gradients)
        norms = torch.stack(norms_of(list(gradients.values())))
        self._looked_at.append((list(gradients), norms, flags))
        self._taken += 1
        if self._taken == len(self._buckets):
            self._reading = Reading([tensor for _, *tensors in self._looked_at for tensor in tensors])

    def _read(self, reading: Reading) -> None:
        numbers = iter(reading.get())
        for names, *_ in self._looked_at:
            for name, norm, flag in zip(names, next(numbers), next(numbers)):
                if not flag:
                    self.gradients[name] = None
                elif name not in self._excluded_from_norm:
                    self.squares[name] = norm * norm
        self._looked_at, self._reading = [], None


class _Sent:
    """Bucket whose all-reduce has started."""

    def __init__(self, bucket: Bucket, flat: Tensor, group: dist.ProcessGroup, clock: Clock) -> None:
        self.bucket, self.flat, self._clock = bucket, flat, clock
        self.ended: Moment | None = None
        self.work = started(dist.all_reduce(flat, group=group, async_op=True))
        if clock is not HOST or not flat.is_cuda:  # on a GPU, a callback takes one of torch's few streams
            self.work.get_future().add_done_callback(self._end)

    def _end(self, _: object) -> None:
        # With NCCL this is called at once, on a stream that waits for the sum.
        self.ended = self._clock.now()


def _parts(names: list[str], like: Mapping[str, Tensor], bucket_bytes: int) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    size = 0
    for name in names:
        if size >= bucket_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += like[name].nbytes
    return parts


class TiedGradients:
    """Gradients, in one mini-batch, of the parameters that this stage shares with other stages.

    Args:
        mesh: connected mesh of ranks.
        ties: shared parameters of this stage.
        parameters: name -> parameter of this stage.
        tags: tag of the messages of each shared parameter. Mini-batches in flight have different tags, since messages
            from a GPU are sent in any order, as soon as they are on the host.

    Attributes:
        names: names of the shared parameters on this stage.
        counted_by_others: names of the shared parameters that another stage counts in the norm of the gradient.
    """

    def __init__(self, mesh: Mesh, ties: Sequence[Tie], parameters: dict[str, Tensor], tags: Sequence[int]) -> None:
        self.names = names_on(mesh.stage, ties)
        self.counted_by_others = names_on(mesh.stage, [tie for tie in ties if tie.stages[0] != mesh.stage])
        self._mesh, self._ties, self._parameters, self._tags = mesh, ties, parameters, tags
        self._buckets = [Bucket([tie.name_on(mesh.stage)], parameters) for tie in ties]
        # Receives are posted before sends, so that messages need not be buffered. Sums of later stages and whole sums
        # have the same tags, but between two ranks they travel in opposite directions.
        with lost_peers():
            self._from_next_sharing = [self._receive(n, tie.next_sharing(mesh.stage)) for n, tie in enumerate(ties)]
            firsts = [None if tie.prev_sharing(mesh.stage) is None else tie.stages[0] for tie in ties]
            self._whole = [self._receive(n, first) for n, first in enumerate(firsts)]
        self._sends: list[HostWork] = []

    def have_arrived(self) -> bool:
        """Return whether the sums of later stages have arrived, so that :meth:`pass_on` does not wait."""
        return all(received is None or received.work.is_completed() for received in self._from_next_sharing)

    def has_whole_sums(self) -> bool:
        """Return whether :meth:`pass_on` and :meth:`take_whole_sums` can run without a wait."""
        return self.have_arrived() and all(whole is None or whole.work.is_completed() for whole in self._whole)

    def pass_on(self, gradients: Gradients, uses: Mapping[str, Sequence[Tensor]]) -> None:
        """Wait for later stages' sums, add this stage's gradients, and send the sums on.

        Args:
            gradients: name -> gradient; if this stage is the first that shares the parameter (and counts it in the
                norm), the sum over all stages replaces the gradient.
            uses: name -> gradients of several uses on this stage, in the order of their addition.
        """
        for number, (tie, bucket) in enumerate(zip(self._ties, self._buckets)):
            name = tie.name_on(self._mesh.stage)
            own = uses[name] if name in uses else [g for g in (gradients[name],) if g is not None]
            later = self._taken(self._from_next_sharing, number)
            total = sum_of(own if later is None else [later, *own])
            prev = tie.prev_sharing(self._mesh.stage)
            if prev is None:
                gradients[name] = total
            self._send(number, bucket.pack({name: total}), tie.stages[1:] if prev is None else (prev,))

    def take_whole_sums(self, gradients: Gradients) -> None:
        """Wait for the sums over all stages, from the first sharing stages, and replace this stage's gradients by them.

        Args:
            gradients: name -> gradient, changed in place.
        """
        for number, tie in enumerate(self._ties):
            if tie.prev_sharing(self._mesh.stage) is not None:
                gradients[tie.name_on(self._mesh.stage)] = self._taken(self._whole, number)

    def have_been_sent(self) -> bool:
        """Free the sends that have completed, and return whether all have completed."""
        self._sends = [work for work in self._sends if not work.is_completed()]
        return not self._sends

    def settle(self) -> None:
        """Wait until all sends have completed."""
        with lost_peers():
            for work in self._sends:
                work.wait()
        self._sends = []

    def _receive(self, number: int, stage: int | None) -> _Received | None:
        if stage is None:
            return None
        like = self._parameters[self._buckets[number].names[0]]
        flat = torch.empty(like.numel() + 1, dtype=like.dtype, device="cpu", pin_memory=not like.is_cpu)
        return _Received(self._mesh.receive(flat, self._mesh.rank_of(stage), self._tags[number]), flat)

    def _taken(self, received: list[_Received | None], number: int) -> Tensor | None:
        """Wait for a received gradient and return it; afterwards this object does not keep the gradient's memory."""
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
    """Pending receive of a gradient, and the tensor that it fills."""

    work: HostWork
    flat: Tensor


def tags_of(ties: Sequence[Tie], whole: Sequence[Tie], mini_batch: int) -> list[int]:
    """Return the tags of shared parameters in a mini-batch; they are the same on all stages.

    Args:
        ties: shared parameters of a stage.
        whole: shared parameters of the whole model.
        mini_batch: index of the mini-batch.
    """
    turn = mini_batch % _MOST_MINI_BATCHES * len(whole)
    return [_TAG + (turn + whole.index(tie)) * _MOST_TAGS for tie in ties]

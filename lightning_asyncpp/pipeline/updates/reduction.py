"""Sums the gradients of a mini-batch over the replicas, in the background.

A bucket is sent off as soon as the last backward of the mini-batch has completed it, while the rest of that backward
runs; what arrives is taken up, and its norm computed, as soon as anybody looks. The host reads all norms, and which
gradients there are, in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.pipeline import foreach
from lightning_asyncpp.pipeline.clocks import HOST, Clock, Moment
from lightning_asyncpp.pipeline.errors import ConfigurationError, lost_peers
from lightning_asyncpp.pipeline.ranks.mesh import started
from lightning_asyncpp.pipeline.updates.buckets import Bucket, Gradients
from lightning_asyncpp.pipeline.wire.reading import Reading


class _Sent:
    """A bucket on its way."""

    def __init__(self, bucket: Bucket, flat: Tensor, group: dist.ProcessGroup, clock: Clock) -> None:
        self.bucket, self.flat, self._clock = bucket, flat, clock
        self.ended: Moment | None = None
        self.work = started(dist.all_reduce(flat, group=group, async_op=True))
        if clock is not HOST or not flat.is_cuda:  # on a GPU each takes one of torch's few streams
            self.work.get_future().add_done_callback(self._end)

    def _end(self, _: object) -> None:
        # With NCCL this is called at once, on a stream that waits for the sum.
        self.ended = self._clock.now()


class Reduction:
    """The reduction of one mini-batch.

    Args:
        buckets: how this stage's gradients are packed; the same on all replicas, which send them in this order.
        group: the ranks of this stage in all replicas.
        late: names whose gradients no backward completes by itself.
        apart: names that are left out of ``squares``.
        clock: by which it is measured.

    Attributes:
        gradients: name -> sum over the replicas, of the buckets that were taken up; None where no replica had one, once
            all were.
        squares: the sum of squares of each gradient that there is, in fp64, once all buckets were taken up.
        started: when the first bucket was sent, a moment of the clock; None before.
        ends: when each arrived that was taken up.
        num_bytes: size of what was sent, in bytes.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup,
        late: Collection[str] = (),
        apart: Collection[str] = (),
        clock: Clock = HOST,
    ) -> None:
        self.gradients: Gradients = {}
        self.squares: list[float] = []
        self.started: Moment | None = None
        self.ends: list[Moment] = []
        self.num_bytes = 0
        self._buckets, self._group, self._apart, self._clock = buckets, group, apart, clock
        self._sent: list[_Sent] = []
        self._taken = 0
        self._looked_at: list[tuple[list[str], Tensor, Tensor]] = []  # names; their norms; whether they are there
        self._reading: Reading | None = None
        self._missing = [set(bucket.names) for bucket in buckets]
        self._bucket_of = {
            name: number for number, bucket in enumerate(buckets) for name in bucket.names if name not in late
        }

    @contextmanager
    def watching(self, leaves: Mapping[str, Tensor], gradient_of: Callable[[str], Tensor | None]) -> Iterator[None]:
        """Send buckets as the backward that runs meanwhile, the last of its mini-batch, completes them.

        Args:
            leaves: name -> the tensor whose gradient it is; others are of no interest.
            gradient_of: name -> its gradient, summed over the mini-batch.
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
        """Send what the last backward left incomplete: parameters without a gradient in it, or none at all."""
        while len(self._sent) < len(self._buckets):
            self._send(gradients)

    def poll(self) -> bool:
        """Take up what has arrived; returns whether that is everything. Waits for nothing."""
        while self._taken < len(self._sent) and self._sent[self._taken].work.is_completed():
            self._take_up()
        if self._reading is not None and self._reading.is_there():
            self._read(self._reading)
        return self._taken == len(self._buckets) and self._reading is None

    def wait(self) -> None:
        """Wait for everything and take it up.

        Raises:
            PeerLostError: another replica is gone.
        """
        while self._taken < len(self._sent):
            self._take_up()
        if self._reading is not None:
            self._read(self._reading)

    def _complete(self, name: str, gradient_of: Callable[[str], Tensor | None]) -> None:
        number = self._bucket_of[name]
        if number < len(self._sent):
            raise ConfigurationError(
                f"the gradient of {name} grew after it was complete: a backward inside a backward added to it, as"
                " torch.utils.checkpoint does for weights that two checkpointed parts share; give it"
                " use_reentrant=False"
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

    def _take_up(self) -> None:
        sent = self._sent[self._taken]
        with lost_peers():
            sent.work.wait()
        self.ends.append(sent.ended or self._clock.now())
        gradients, flags = sent.bucket.views(sent.flat)
        self.gradients.update(gradients)
        self._looked_at.append((list(gradients), foreach.norms(list(gradients.values()), torch.float64), flags))
        self._taken += 1
        if self._taken == len(self._buckets):
            self._reading = Reading([tensor for _, *tensors in self._looked_at for tensor in tensors])

    def _read(self, reading: Reading) -> None:
        numbers = iter(reading.get())
        for names, *_ in self._looked_at:
            for name, norm, flag in zip(names, next(numbers), next(numbers)):
                if not flag > 0:
                    self.gradients[name] = None
                elif name not in self._apart:
                    self.squares.append(norm * norm)
        self._looked_at, self._reading = [], None


def squares(gradients: Mapping[str, Tensor | None]) -> list[float]:
    """Sum of squares of each gradient that there is, in fp64; waits for the device."""
    present = [gradient for gradient in gradients.values() if gradient is not None]
    return [norm * norm for norm in foreach.norms(present, torch.float64).tolist()]

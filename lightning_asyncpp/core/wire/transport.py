"""Activations forward, their gradients backward, and control messages, between the neighbours of a pipeline.

Headers, control messages and tensors on the host go through the links of :mod:`lightning_asyncpp.core.wire.link`,
each in the order in which it was sent. Tensors on GPUs go through NCCL, announced by their headers; where NCCL cannot
be used (several stages on one GPU) they are copied through the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_asyncpp.core.host_copies import HostCopy
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.wire.connect import Neighbours, connect_neighbours
from lightning_asyncpp.core.wire.handover import DeviceTensors
from lightning_asyncpp.core.wire.link import (
    HEADER_BYTES,
    Bytes,
    Frame,
    Header,
    Layout,
    Link,
    TensorInfo,
    memory_of,
    written_out,
)
from lightning_asyncpp.errors import ProtocolError, different_calls, different_ends

_ACTIVATION, _GRADIENT, _PART, _TOTAL, _END, _RUN_END, _LOADED, _DROP, _LAYOUT = range(1, 10)
_MOST_DROPS = 16  # that a neighbour may be behind: it is at most a few mini-batches
_NAMES = {
    _ACTIVATION: "an activation", _GRADIENT: "a gradient", _PART: "a part of a sum", _TOTAL: "a sum", _END: "an end",
    _RUN_END: "the end of the run", _LOADED: "a batch of the data loader", _DROP: "a gradient thrown away",
    _LAYOUT: "a layout",
}  # fmt: skip


class Arrival(NamedTuple):
    """An activation that arrived."""

    header: Header
    tensors: tuple[Tensor, ...]


with torch.inference_mode(False):
    # What the nodes hang on: autograd visits only what leads to a leaf that needs a gradient. It gets none.
    _ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


def begin(tensor: Tensor) -> tuple[Tensor, Any]:
    """Let the graph begin at a received tensor.

    As a leaf that needs a gradient it could not be changed in place, which a layer may do with what another layer made
    (``x += ...``, ``ReLU(inplace=True)``). So it is handed out as the result of a node, whose backward takes the
    gradient.

    Returns:
        A tensor with the same memory that needs a gradient and is no leaf, and its node, for :func:`arrived_at`. The
        node does not hold the tensor, which holds it: such a cycle is never collected.
    """
    started: Tensor = _Begin.apply(_ANCHOR, tensor)
    return started, started.grad_fn


def arrived_at(node: Any) -> Tensor:
    """The gradient that a backward brought to a node, summed over all uses of its tensor; zeros if there are none.

    Its dimensions are as the tensor's lie in memory: so it travels.
    """
    gradient = node.info.empty(node.device).zero_() if node.gradient is None else node.gradient
    stored: Tensor = node.info.stored(gradient)
    return stored


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.info, ctx.device, ctx.gradient = TensorInfo.of(tensor), tensor.device, None
        return tensor.data  # not as a view: views that a custom function returns must not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.gradient = gradient
        return None, None


class Transport:
    """Messages of one stage with its two neighbours. Making one is a collective call.

    Args:
        mesh: this rank's place; its groups are connected.
        device: where tensors live.
        timeout: seconds that a wait for a neighbour may take; default: half an hour.
        neighbours: links that are there already, for tests.

    Attributes:
        is_local: whether the neighbours are in this process.
    """

    is_local = False

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        timeout: float | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        self.mesh, self.device = mesh, device
        self._before, self._after = neighbours or connect_neighbours(mesh, timeout, timeout)
        self._direct = DeviceTensors.between(mesh, device, timeout)
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._layout_sent: Layout | None = None
        self._layout_received = Layout()
        self._sums: dict[tuple[int, int], Tensor] = {}  # (kind, mini-batch) -> control message that came early
        self._closed = False
        self._drops: deque[int] = deque(maxlen=_MOST_DROPS)
        self._sent = self._received = 0  # one past the microbatch of the newest activation

    @property
    def route(self) -> str:
        """Description of how tensors travel."""
        if self._direct is not None:
            return "between GPUs by NCCL"
        return "over sockets" if self.device.type == "cpu" else "through the host, over sockets"

    # -- activations ----------------------------------------------------------------------------------------------

    def send_activation(self, header: Header, tensors: tuple[Tensor, ...]) -> None:
        """Send an activation, or the header alone, to the stage after."""
        assert self._after is not None, "nothing comes after the last stage"
        if (layout := header.layout) != self._layout_sent:
            self._after.write(_LAYOUT, header.k, [layout.pack()])
            self._layout_sent = layout
        stored = [info.stored(tensor) for tensor, info in zip(tensors, header.tensors)]
        parts: list[Bytes] = [header.pack()]
        if self._direct is None:
            parts += map(_bytes_of, stored)
        else:  # before it is announced
            self._direct.put_activation(stored)
        self._after.write(_ACTIVATION, header.k, parts)
        self._sent = header.k + 1

    def receive_activation(self, k: int) -> Arrival:
        """Return the activation of microbatch ``k``, the next to come, waiting for it; not on the first stage.

        Raises:
            PeerLostError: the stage before is gone.
            ProtocolError: what came is not what was agreed on.
        """
        link = self._before
        assert link is not None, "nothing comes before the first stage"
        frame = self._next(link, _ACTIVATION)
        if frame.number != k:
            raise different_calls(f"expected microbatch {k} from the stage before, got {frame.number}")
        link.read_into(self._header)
        header = Header.read(self._header, k, self._layout_received)
        self._received = k + 1
        if self._direct is not None:
            return Arrival(header, tuple(self._direct.take_activation(header.tensors)))
        tensors = []
        for info in header.tensors:
            tensors.append(info.empty(self.device))
            self._read_into(link, tensors[-1])
        return Arrival(header, tuple(tensors))

    # -- gradients ------------------------------------------------------------------------------------------------

    def receive_gradients(self, k: int, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of microbatch ``k``, waiting until the stage after has sent them.

        Args:
            k: the microbatch.
            outputs: what was sent there and needs a gradient, in this order.

        Raises:
            PeerLostError: the stage after is gone.
            ProtocolError: what came is not what was agreed on.
        """
        link, infos = self._after, list(map(TensorInfo.of, outputs))
        assert link is not None, "nothing comes after the last stage"
        # Before the wait, which everything that comes after it prolongs.
        gradients = [] if self._direct is not None else [info.empty(self.device) for info in infos]
        size = sum([gradient.nbytes for gradient in gradients])
        frame = self._next(link, _GRADIENT)
        if frame.number != k or frame.num_bytes != size:
            raise ProtocolError(
                f"expected the gradient of microbatch {k} with {size} bytes, got that of {frame.number} with"
                f" {frame.num_bytes}"
            )
        if self._direct is not None:
            return self._direct.take_gradients(infos)
        for gradient in gradients:
            self._read_into(link, gradient)
        return gradients

    def send_gradients(self, k: int, gradients: list[Tensor]) -> None:
        """Send the gradients of microbatch ``k``, each as its activation lies in memory, to the stage before."""
        assert self._before is not None, "nothing comes before the first stage"
        parts: list[Bytes] = []
        if self._direct is None:
            parts += map(_bytes_of, gradients)
        else:
            self._direct.put_gradients(gradients)
        self._before.write(_GRADIENT, k, parts)

    # -- control messages -----------------------------------------------------------------------------------------

    def send_part(self, mini_batch: int, vector: Tensor) -> None:
        """Send what this stage and those behind it have summed up, fp64 on the host, to the stage before."""
        assert self._before is not None, "nothing comes before the first stage"
        self._before.write(_PART, mini_batch, [_bytes_of(vector)])

    def has_part(self, mini_batch: int) -> bool:
        """Return whether :meth:`receive_part` can be called: here it waits."""
        return True

    def receive_part(self, mini_batch: int, length: int) -> Tensor:
        """Return what the stages behind have summed up, waiting for it: ``length`` fp64 values."""
        return self._receive_sum(self._after, _PART, mini_batch, length)

    def send_total(self, mini_batch: int, vector: Tensor) -> None:
        """Send the sum of all stages towards the last one; those between pass it on as they meet it."""
        assert self._after is not None, "nothing comes after the last stage"
        self._after.write(_TOTAL, mini_batch, [_bytes_of(vector)])

    def receive_total(self, mini_batch: int, length: int) -> Tensor:
        """Return the sum of all stages, waiting for it: ``length`` fp64 values."""
        return self._receive_sum(self._before, _TOTAL, mini_batch, length)

    def announce_drop(self, k: int) -> None:
        """Tell the neighbours that the gradient of batches before microbatch ``k`` is thrown away; never waits.

        They do the same. Where ranks decide otherwise, each would wait for what the other does not send.
        """
        self._drops.append(k)
        for link in (self._before, self._after):
            if link is not None:
                link.write(_DROP, k, [])

    # -- what the first stage loads -----------------------------------------------------------------------------------

    def announce_loaded(self, step: int) -> None:
        """Tell the stages in the middle what the first stage's loader brought, a small number; never waits."""
        if self._after is not None and not self._closed and self.mesh.stage < self.mesh.num_stages - 2:
            self._after.write(_LOADED, step, [])

    def follow_loaded(self) -> int:
        """Wait for what the first stage's loader brought, and pass it on; on a stage in the middle.

        Raises:
            PeerLostError: the stage before is gone.
            ProtocolError: it has not loaded anything.
        """
        assert self._before is not None, "the first stage loads by itself"
        frame = self._next(self._before, _LOADED)
        self.announce_loaded(frame.number)
        return frame.number

    # -- ends -----------------------------------------------------------------------------------------------------

    def announce_end(self) -> None:
        """Tell the stage after that no activation comes until it has ended what it runs, too; never waits."""
        if self._after is not None and not self._closed:  # weights may be gathered after a run, which drains, too
            self._after.write(_END, self._sent, [])

    def announce_end_of_run(self) -> None:
        """Tell the stage after that nothing comes any more: it may wait for something that is not sent; never waits."""
        if self._after is not None and not self._closed:
            self._after.write(_RUN_END, self._sent, [])

    def expect_end(self) -> None:
        """Wait until the stage before has announced its end, after the activation that was received last.

        Raises:
            PeerLostError: the stage before is gone.
            ProtocolError: it has a further batch.
        """
        if self._before is None or self._closed:
            return
        frame = self._next(self._before, _END)
        if frame.number != self._received:
            raise ProtocolError(
                f"{self._before.peer} says that it ended before microbatch {frame.number}, and {self._received} is the"
                f" next: {frame}"
            )

    # -- everything -----------------------------------------------------------------------------------------------

    def wait_for_stage_after(self, backlog: int) -> None:
        """Wait until no more than ``backlog`` parts of messages to the stage after are unsent."""
        if self._after is not None:
            self._after.wait_for_backlog(backlog)
        if self._direct is not None:
            self._direct.wait_for_stage_after(backlog)

    def settle(self) -> None:
        """Wait until tensors that are sent from device to device have left, and let go of them."""
        if self._direct is not None:
            self._direct.settle()

    def leave_neighbours(self) -> None:
        """End both connections, from any thread: neighbours that wait get an error."""
        for link in (self._before, self._after):
            if link is not None:
                link.hang_up()
        if self._direct is not None:
            self._direct.close()

    def close(self) -> None:
        """Let go of the connections; what was sent still arrives."""
        self._closed = True
        for link in (self._before, self._after):
            if link is not None:
                link.close()
        if self._direct is not None:
            self._direct.close()

    def _next(self, link: Link, kind: int) -> Frame:
        """The frame of the next message of ``kind``; control messages before it are put aside."""
        while (frame := link.read_frame()).kind != kind:
            self._put_aside(link, frame, kind)
        return frame

    def _receive_sum(self, link: Link | None, kind: int, mini_batch: int, length: int) -> Tensor:
        assert link is not None, "there is no stage on that side"
        while (kind, mini_batch) not in self._sums:
            self._put_aside(link, link.read_frame(), kind)
        vector = self._sums.pop((kind, mini_batch))
        if vector.numel() != length:
            raise ProtocolError(f"mini-batch {mini_batch}: {vector.numel()} values instead of {length}")
        return vector

    def _put_aside(self, link: Link, frame: Frame, expected: int) -> None:
        """Keep what may come in front of what is waited for: a layout, a control message, a drop that was one here."""
        kind, number, size = frame
        if kind == _DROP and number in self._drops:
            return
        if kind == _LAYOUT:
            message = bytearray(size)
            link.read_into(memoryview(message))
            self._layout_received = Layout.read(bytes(message))
            return
        if kind != (_TOTAL if link is self._before else _PART):
            raise _unexpected(link.peer, frame, expected, self._received)
        vector = torch.empty(size // 8, dtype=torch.float64, device="cpu")
        self._read_into(link, vector)
        self._sums[kind, number] = vector
        if kind == _TOTAL and self._after is not None:
            self.send_total(number, vector)

    def _read_into(self, link: Link, tensor: Tensor) -> None:
        """Fill a tensor without gaps, in the order of its memory."""
        host = tensor if tensor.is_cpu else torch.empty_like(tensor, device="cpu", pin_memory=True)
        link.read_into(memory_of(host).numpy().data)  # as bytes: numpy does not know all of torch's dtypes
        if host is not tensor:
            tensor.copy_(host, non_blocking=True)  # in the stream's order; torch keeps the pinned memory until then


def _unexpected(peer: str, frame: Frame, expected: int, received: int) -> ProtocolError:
    if expected in (_ACTIVATION, _LOADED) and frame.kind == _END:
        return different_ends(peer, "this rank", frame.number)
    if expected == _END and frame.kind in (_ACTIVATION, _LOADED):
        return different_ends("this rank", peer, received)
    what = f"expected {_NAMES[expected]} from {peer}, got {_NAMES.get(frame.kind, 'something else')}: {frame}"
    return different_calls(what) if frame.kind in _NAMES else ProtocolError(what)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor; those on a GPU come to the host first."""
    tensor = written_out(tensor)
    view: memoryview = memory_of(tensor if tensor.is_cpu else HostCopy(tensor).wait()).numpy().data
    return view

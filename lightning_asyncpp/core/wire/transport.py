"""Transport of activations, gradients and control messages (:class:`.PipelineSum`) between neighbouring stages.

Headers, control messages and tensors on the host go through the links of :mod:`lightning_asyncpp.core.wire.link`, in
order. Tensors on GPUs go through NCCL; headers announce these tensors. If NCCL cannot be used (several stages on one
GPU), the tensors are copied through the host.
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
_MOST_DROPS = 16  # remembered drops; neighbours are at most a few mini-batches behind
_NAMES = {
    _ACTIVATION: "an activation", _GRADIENT: "a gradient", _PART: "a part of a sum", _TOTAL: "a sum", _END: "an end",
    _RUN_END: "the end of the run", _LOADED: "a batch of the data loader", _DROP: "a drop of a gradient",
    _LAYOUT: "a layout",
}  # fmt: skip


class Arrival(NamedTuple):
    """Received activation."""

    header: Header
    tensors: tuple[Tensor, ...]


with torch.inference_mode(False):
    # Input of the nodes of begin(): autograd visits a node only if it leads to a leaf that requires a gradient.
    _ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


def begin(tensor: Tensor) -> tuple[Tensor, Any]:
    """Begin the autograd graph at a received tensor.

    Layers may change their input in place (``x += ...``, ``ReLU(inplace=True)``), which autograd forbids for a leaf
    that requires a gradient. So the tensor becomes the output of a node, whose backward keeps the gradient.

    Returns:
        Tensor with the same memory, which requires a gradient and is not a leaf; and its node, for :func:`arrived_at`.
        The node does not refer to the tensor, since such a cycle would never be collected.
    """
    started: Tensor = _Begin.apply(_ANCHOR, tensor)
    return started, started.grad_fn


def arrived_at(node: Any) -> Tensor:
    """Return the gradient that a backward passed to a node; zeros if there was no gradient.

    The gradient's dimensions are in the order of the tensor's memory, for sending.
    """
    gradient = node.info.empty(node.device).zero_() if node.gradient is None else node.gradient
    stored: Tensor = node.info.stored(gradient)
    return stored


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.info, ctx.device, ctx.gradient = TensorInfo.of(tensor), tensor.device, None
        return tensor.data  # not a view: a view that a custom function returns must not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.gradient = gradient
        return None, None


class Transport:
    """Transport between one stage and its neighbours; construction is a collective call.

    Args:
        mesh: connected mesh of ranks.
        device: device of this stage.
        timeout: longest wait for a neighbour, in seconds; default: half an hour.
        neighbours: existing links, for tests.

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
        self._prev, self._next = neighbours or connect_neighbours(mesh, timeout, timeout)
        groups = mesh.groups
        has_direct = groups is not None and (groups.from_prev is not None or groups.to_next is not None)
        self._direct = DeviceTensors(mesh, device, timeout) if has_direct else None
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._layout_sent: Layout | None = None
        self._layout_received = Layout()
        self._sums: dict[tuple[int, int], Tensor] = {}  # (kind, mini-batch) -> early control message
        self._closed = False
        self._drops: deque[int] = deque(maxlen=_MOST_DROPS)
        self._sent = self._received = 0  # one past the microbatch of the newest activation

    @property
    def route(self) -> str:
        """Description of the route of tensors."""
        if self._direct is not None:
            return "between GPUs by NCCL"
        return "over sockets" if self.device.type == "cpu" else "through the host, over sockets"

    # -- activations ----------------------------------------------------------------------------------------------

    def send_forward(self, header: Header, tensors: tuple[Tensor, ...]) -> None:
        """Send an activation to the next stage, or only a header."""
        assert self._next is not None, "the last stage has no next stage"
        if header.layout != self._layout_sent:
            self._next.write(_LAYOUT, header.k, [header.layout.pack()])
            self._layout_sent = header.layout
        stored = [info.stored(tensor) for tensor, info in zip(tensors, header.layout.tensors)]
        parts: list[Bytes] = [header.pack()]
        if self._direct is None:
            parts += map(_bytes_of, stored)
        else:  # before the header announces the tensors
            self._direct.to_next.put(stored)
        self._next.write(_ACTIVATION, header.k, parts)
        self._sent = header.k + 1

    def recv_forward(self, k: int) -> Arrival:
        """Wait for the activation of microbatch ``k``, the next in order, and return it.

        Raises:
            PeerLostError: the previous stage is gone.
            ProtocolError: another message arrived.
        """
        link = self._prev
        assert link is not None, "the first stage has no previous stage"
        frame = self._next_frame(link, _ACTIVATION)
        if frame.number != k:
            raise different_calls(f"expected microbatch {k} from the stage before, got {frame.number}")
        link.read_into(self._header)
        header = Header.read(self._header, k, self._layout_received)
        self._received = k + 1
        if self._direct is not None:
            return Arrival(header, tuple(self._direct.from_prev.take(header.layout.tensors)))
        tensors = []
        for info in header.layout.tensors:
            tensors.append(info.empty(self.device))
            self._read_into(link, tensors[-1])
        return Arrival(header, tuple(tensors))

    # -- gradients ------------------------------------------------------------------------------------------------

    def recv_backward(self, k: int, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Wait for the gradients of microbatch ``k`` from the next stage, and return them.

        Args:
            k: number of the microbatch.
            outputs: those tensors sent to the next stage that require a gradient, in order.

        Raises:
            PeerLostError: the next stage is gone.
            ProtocolError: another message arrived.
        """
        link, infos = self._next, list(map(TensorInfo.of, outputs))
        assert link is not None, "the last stage has no next stage"
        # Allocate before the wait, since time after the wait is on the critical path.
        gradients = [] if self._direct is not None else [info.empty(self.device) for info in infos]
        size = sum([gradient.nbytes for gradient in gradients])
        frame = self._next_frame(link, _GRADIENT)
        if frame.number != k or frame.num_bytes != size:
            raise ProtocolError(
                f"expected the gradient of microbatch {k} with {size} bytes, got that of {frame.number} with"
                f" {frame.num_bytes}"
            )
        if self._direct is not None:
            return self._direct.from_next.take(infos)
        for gradient in gradients:
            self._read_into(link, gradient)
        return gradients

    def send_backward(self, k: int, gradients: list[Tensor]) -> None:
        """Send the gradients of microbatch ``k``, in the memory order of the activations, to the previous stage."""
        assert self._prev is not None, "the first stage has no previous stage"
        parts: list[Bytes] = []
        if self._direct is None:
            parts += map(_bytes_of, gradients)
        else:
            self._direct.to_prev.put(gradients)
        self._prev.write(_GRADIENT, k, parts)

    # -- control messages -----------------------------------------------------------------------------------------

    def send_partial_sum(self, mini_batch: int, vector: Tensor) -> None:
        """Send the sum of control messages over this and all later stages, fp64 on the host, to the previous stage."""
        assert self._prev is not None, "the first stage has no previous stage"
        self._prev.write(_PART, mini_batch, [_bytes_of(vector)])

    def has_partial_sum(self, mini_batch: int) -> bool:
        """Return whether the sum has arrived.

        Between processes always True: the wait is short, so the caller may block; False only in one process, where a
        wait would deadlock.
        """
        return True

    def receive_partial_sum(self, mini_batch: int) -> Tensor:
        """Wait for the sum of control messages over all later stages, and return it."""
        return self._receive_sum(self._next, _PART, mini_batch)

    def send_total(self, mini_batch: int, vector: Tensor) -> None:
        """Send the sum of control messages over all stages to the next stage, which reads the sum and passes it on."""
        assert self._next is not None, "the last stage has no next stage"
        self._next.write(_TOTAL, mini_batch, [_bytes_of(vector)])

    def receive_total(self, mini_batch: int) -> Tensor:
        """Wait for the sum of control messages over all stages, and return it."""
        return self._receive_sum(self._prev, _TOTAL, mini_batch)

    def announce_drop(self, k: int) -> None:
        """Tell the neighbours that the gradient of the open mini-batch, which ends before microbatch ``k``, is dropped.

        Never waits. The neighbours must drop this gradient, too. A neighbour that does not drop it raises an error.
        """
        self._drops.append(k)
        for link in (self._prev, self._next):
            if link is not None:
                link.write(_DROP, k, [])

    # -- data loader ----------------------------------------------------------------------------------------------

    def announce_loaded(self, step: int) -> None:
        """Tell stages in the middle what the first stage's loader returned; never waits.

        Args:
            step: number that means a batch, no batch, or the loader's end.
        """
        if self._next is not None and not self._closed and self.mesh.stage < self.mesh.num_stages - 2:
            self._next.write(_LOADED, step, [])

    def follow_loaded(self) -> int:
        """Wait, on a stage in the middle, for the number that :meth:`announce_loaded` sent; pass it on and return it.

        Raises:
            PeerLostError: the previous stage is gone.
            ProtocolError: the previous stage sent another message.
        """
        assert self._prev is not None, "the first stage has its own loader"
        frame = self._next_frame(self._prev, _LOADED)
        self.announce_loaded(frame.number)
        return frame.number

    # -- ends -----------------------------------------------------------------------------------------------------

    def announce_end(self) -> None:
        """Tell the next stage that no activation follows until both stages have nothing in flight; never waits."""
        if self._next is not None and not self._closed:  # after a run, gathering weights drains with closed links
            self._next.write(_END, self._sent, [])

    def announce_end_of_run(self) -> None:
        """Tell the neighbours, which may be waiting for a message, that none will follow; never waits."""
        for link in (self._prev, self._next):
            if link is not None and not self._closed:
                link.write(_RUN_END, self._sent, [])

    def expect_end(self) -> None:
        """Wait until the previous stage has announced its end, right after the last received activation.

        Raises:
            PeerLostError: the previous stage is gone.
            ProtocolError: the previous stage has a further batch.
        """
        if self._prev is not None and not self._closed:
            self._next_frame(self._prev, _END)

    # -- everything -----------------------------------------------------------------------------------------------

    def wait_for_stage_after(self, backlog: int) -> None:
        """Wait until at most ``backlog`` parts of messages to the next stage are unsent.

        Between GPUs, also wait until the next stage has taken all but ``backlog`` activations.
        """
        if self._next is not None:
            self._next.wait_for_backlog(backlog)
            if self._direct is not None:
                self._direct.to_next.wait_until_taken(backlog)

    def settle(self) -> None:
        """Wait until sends between devices have completed, and free their tensors."""
        if self._direct is not None:
            self._direct.settle()

    def abort(self) -> None:
        """End both connections, so that waiting neighbours raise an error; may be called from any thread."""
        for link in (self._prev, self._next):
            if link is not None:
                link.abort()
        if self._direct is not None:
            self._direct.close()

    def close(self) -> None:
        """Close the connections; sent messages still arrive."""
        self._closed = True
        for link in (self._prev, self._next):
            if link is not None:
                link.close()
        if self._direct is not None:
            self._direct.close()

    def _next_frame(self, link: Link, kind: int) -> Frame:
        """Wait for the next message of ``kind``, and return its frame; messages before it are put aside."""
        while (frame := link.read_frame()).kind != kind:
            self._put_aside(link, frame, kind)
        return frame

    def _receive_sum(self, link: Link | None, kind: int, mini_batch: int) -> Tensor:
        assert link is not None, "there is no stage on that side"
        while (kind, mini_batch) not in self._sums:
            self._put_aside(link, link.read_frame(), kind)
        return self._sums.pop((kind, mini_batch))

    def _put_aside(self, link: Link, frame: Frame, expected: int) -> None:
        """Process a message that comes before the expected one: a layout, a control message, or an agreed drop."""
        kind, number, size = frame
        if kind == _DROP and number in self._drops:
            return
        if kind == _LAYOUT:
            message = bytearray(size)
            link.read_into(memoryview(message))
            self._layout_received = Layout.read(bytes(message))
            return
        if kind != (_TOTAL if link is self._prev else _PART):
            raise _unexpected(link.peer, frame, expected, self._received)
        vector = torch.empty(size // 8, dtype=torch.float64, device="cpu")
        self._read_into(link, vector)
        self._sums[kind, number] = vector
        if kind == _TOTAL and self._next is not None:
            self.send_total(number, vector)

    def _read_into(self, link: Link, tensor: Tensor) -> None:
        """Fill the memory of a dense tensor."""
        host = tensor if tensor.is_cpu else torch.empty_like(tensor, device="cpu", pin_memory=True)
        link.read_into(memory_of(host).numpy().data)  # as bytes: numpy lacks some of torch's dtypes
        if host is not tensor:
            tensor.copy_(host, non_blocking=True)  # torch keeps the pinned memory until the copy is done


def _unexpected(peer: str, frame: Frame, expected: int, received: int) -> ProtocolError:
    if expected in (_ACTIVATION, _LOADED) and frame.kind == _END:
        return different_ends(peer, "this rank", frame.number)
    if expected == _END and frame.kind in (_ACTIVATION, _LOADED):
        return different_ends("this rank", peer, received)
    what = f"expected {_NAMES[expected]} from {peer}, got {_NAMES.get(frame.kind, 'something else')}: {frame}"
    return different_calls(what) if frame.kind in _NAMES else ProtocolError(what)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, copied to the host if it is on a GPU."""
    tensor = written_out(tensor)
    view: memoryview = memory_of(tensor if tensor.is_cpu else HostCopy(tensor).wait()).numpy().data
    return view

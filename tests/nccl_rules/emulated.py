"""Emulation of NCCL's rules on gloo, so that they apply to runs on CPUs.

These are the rules of NCCL that gloo does not enforce:

* each group has one stream, on which its messages run one after the other, in the order in which they were issued;
* if all streams share one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``), work that cannot start yet blocks all
  work issued after it; such work is a message behind another one of its group, or a computation on a received tensor;
* a message occupies its stream until the other side issues its counterpart: only then do both end;
* ``wait()`` does not wait for a send, and the bytes are read when the message runs, not when it was issued;
* a received tensor must not be read before ``wait()``: here it holds NaN until then;
* NCCL supports few dtypes, and int16 is not one of them;
* a wait for the whole device (``torch.cuda.synchronize()``, ``empty_cache()``, the end of a profile) waits for every
  message that was issued. So a receive must not be issued before its send, whose host may be in such a wait.

Here a thread emulates a queue. Waits for the whole device occur at random moments: in layers, before and after
backwards, in the optimizer, and when memory for messages is allocated.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_asyncpp.core.runner import StageRunner
from lightning_asyncpp.core.updates import reduction
from lightning_asyncpp.core.wire import handover
from lightning_asyncpp.core.wire.handover import DeviceTensors
from lightning_asyncpp.core.wire.link import TensorInfo

HANG_SECONDS = 20.0
_SLOWEST_SECONDS = 0.002
_KNOWN_DTYPES = frozenset({
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool,
})  # fmt: skip
_delays = random.Random()  # not the global generators of torch or Python, which a run manages


Queue: TypeAlias = "queue.SimpleQueue[tuple[Message, Callable[[], object]]]"
"""Queue of issued work: messages with their ``run``, and waits for them."""


class Device:
    """Emulated device of a rank: its queues, and its random waits for all issued messages; see :func:`emulate`."""

    def __init__(self, rank: int, share_of_waits: float, one_queue: bool) -> None:
        self.violations: list[str] = []
        self.is_connecting = False
        self._share, self._one_queue = share_of_waits, one_queue
        self._random = random.Random(rank)
        self._queues: defaultdict[int, Queue] = defaultdict(_started_queue)
        self._issued: list[Message] = []

    def issue(self, message: Message) -> Message:
        """Put a message on its group's stream, and return it."""
        self._issued = [other for other in self._issued if not other.is_completed()] + [message]
        self._queue_of(message).put((message, message.run))
        return message

    def after(self, message: Message) -> None:
        """Put a wait for a message on the compute stream, which is emulated only if all streams share a queue."""
        if self._one_queue:
            self._queue_of(message).put((message, message.done.wait))

    def _queue_of(self, message: Message) -> Queue:
        return self._queues[0 if self._one_queue else id(message.group)]

    def maybe_wait(self, *_: Any) -> None:
        """Wait for the whole device at random, at a place where users, torch or its allocator may do so."""
        if self._random.random() < self._share:
            self.wait()

    def wait(self) -> None:
        """Emulate ``torch.cuda.synchronize()``; raise if a message's counterpart would come only after this wait."""
        for message in self._issued:
            message.end("a wait for the whole device")
        self._issued = []

    def check(self) -> None:
        """Raise an error if violations were found in the case that ran."""
        found, self.violations = self.violations, []
        if found:
            raise AssertionError(f"{len(found)} times: {found[0]}")


class Message:
    """Fake ``dist.Work`` of a ``"send"``, a ``"receive"``, or an ``"all-reduce"``, which has no peer."""

    def __init__(self, device: Device, kind: str, tensor: Tensor, peer: int, group: dist.ProcessGroup) -> None:
        if tensor.dtype not in _KNOWN_DTYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        self.kind, self.group, self.done = kind, group, threading.Event()
        self._device, self._tensor, self._peer = device, tensor.detach(), peer
        self._issued = time.monotonic()  # the same clock in all processes of a machine
        self._may_be_early = device.is_connecting  # at their first message, two hosts wait for each other
        self._result: Tensor | None = None
        self._error: Exception | None = None
        if kind == "receive":
            _poison(self._tensor)

    def run(self) -> None:
        """Execute the message, as its stream does."""
        time.sleep(_SLOWEST_SECONDS * _delays.random())
        try:
            {"send": self._send, "receive": self._receive, "all-reduce": self._reduce}[self.kind]()
        except Exception as error:
            self._error = error
        self.done.set()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def end(self, who: str) -> None:
        """Wait until the message has ended; ``who`` is the name of the wait in error messages."""
        if not self.done.wait(HANG_SECONDS):
            raise RuntimeError(f"{who} hangs: {self.kind} was issued too early")

    def wait(self, timeout: object = None) -> bool:
        """Make later work wait for the message; here the host itself waits, except for a send."""
        self._device.after(self)
        if self.kind != "send":
            self.end("compute")
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        if self._result is not None:
            self._tensor.copy_(self._result)
            self._result = None
        return True

    def get_future(self) -> Message:
        """Return the message itself, which has the only method of a future that is used."""
        return self

    def add_done_callback(self, call: Callable[[object], None]) -> None:
        threading.Thread(target=lambda: (self.done.wait(), call(None)), daemon=True).start()

    def _send(self) -> None:
        issued = torch.tensor([self._issued], dtype=torch.float64)
        dist.send(issued, self._peer, group=self.group)
        if self._tensor.numel():
            dist.send(self._tensor, self._peer, group=self.group)
        dist.recv(issued, self._peer, group=self.group)

    def _receive(self) -> None:
        issued = torch.zeros(1, dtype=torch.float64)
        dist.recv(issued, self._peer, group=self.group)
        if issued.item() > self._issued and not self._may_be_early:
            self._device.violations.append("a receive was issued before its send")
        result = torch.empty_like(self._tensor)
        if result.numel():
            dist.recv(result, self._peer, group=self.group)
        self._result = result
        dist.send(issued, self._peer, group=self.group)

    def _reduce(self) -> None:
        result = self._tensor.clone()
        _poison(self._tensor)
        dist.all_reduce(result, group=self.group)
        self._result = result


def _started_queue() -> Queue:
    entries: Queue = queue.SimpleQueue()

    def hand_over() -> None:
        running: dict[int, Message] = {}  # id of a group -> its newest message
        while True:
            message, call = entries.get()
            if call != message.run:
                call()
                continue
            if (before := running.get(id(message.group))) is not None:
                before.done.wait()
            running[id(message.group)] = message
            threading.Thread(target=call, daemon=True).start()

    threading.Thread(target=hand_over, daemon=True).start()
    return entries


class _Distributed:
    """Stand-in for ``torch.distributed`` in the modules that pass device tensors to it."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def isend(self, tensor: Tensor, peer: int, group: dist.ProcessGroup) -> Message:
        return self._device.issue(Message(self._device, "send", tensor, peer, group))

    def irecv(self, tensor: Tensor, peer: int, group: dist.ProcessGroup) -> Message:
        return self._device.issue(Message(self._device, "receive", tensor, peer, group))

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> Message:
        assert async_op, "it would wait for the other replicas"
        return self._device.issue(Message(self._device, "all-reduce", tensor, -1, group))


def emulate(rank: int, share_of_waits: float = 0.03, one_queue: bool = False) -> Callable[[], None]:
    """Apply NCCL's rules in this process from now on, and return a function that raises if they were broken.

    Args:
        rank: seed of the random moments.
        share_of_waits: probability of a wait for the whole device at every place where there may be one.
        one_queue: whether all streams share one hardware queue.
    """
    device = Device(rank, share_of_waits, one_queue)
    handover.dist = reduction.dist = _Distributed(device)  # type: ignore[assignment]
    nn.modules.module.register_module_forward_pre_hook(device.maybe_wait)
    register_optimizer_step_pre_hook(device.maybe_wait)
    backward = StageRunner.backward

    def with_waits(*args: Any) -> None:
        device.maybe_wait()
        backward(*args)
        device.maybe_wait()

    StageRunner.backward = with_waits  # type: ignore[method-assign]
    connect = DeviceTensors._try

    def while_connecting(*args: Any) -> None:
        device.is_connecting = True
        connect(*args)
        device.is_connecting = False

    DeviceTensors._try = while_connecting  # type: ignore[method-assign]
    allocate = TensorInfo.empty

    def with_wait(*args: Any) -> Tensor:
        device.maybe_wait()
        return allocate(*args)

    TensorInfo.empty = with_wait  # type: ignore[method-assign]
    return device.check


def _poison(tensor: Tensor) -> None:
    if tensor.dtype == torch.uint8:  # bytes of any dtype; these are NaN in all floating-point dtypes
        tensor.fill_(255)
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(99)

"""NCCL's rules on gloo, so that a run on CPUs meets them.

What gloo forgives and NCCL does not:

* each group has one stream, on which its messages run one after the other, in the order in which they were issued;
* where all streams share one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``), what cannot start yet holds up all
  that was issued after it: a message behind one of its group, or what is computed from a message;
* a message lies on its stream until the other side issues its counterpart: only then do both end;
* ``wait()`` does not wait for a send, and the bytes are read when the message runs, not when it was issued;
* nobody may read what is received before ``wait()``: until then it holds NaN;
* it knows few dtypes, and int16 is none of them;
* a wait for the whole device (``torch.cuda.synchronize()``, ``empty_cache()``, the end of a profile) waits for every
  message that was issued. So a receive must not be issued before its send is: its host may be in such a wait.

Here a thread stands for a queue. Waits for the whole device come at random moments: in layers, around backwards, in the
optimizer, and where memory for messages is allocated.
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
_delays = random.Random()  # not torch's or Python's own generator, which a run looks after


Queue: TypeAlias = "queue.SimpleQueue[tuple[Message, Callable[[], object]]]"
"""What was issued: a message with its ``run``, or something that waits for it."""


class Device:
    """What a rank has issued, and when it waits for all of it: see :func:`emulate`."""

    def __init__(self, rank: int, share_of_waits: float, one_queue: bool) -> None:
        self.violations: list[str] = []
        self.is_connecting = False
        self._share, self._one_queue = share_of_waits, one_queue
        self._random = random.Random(rank)
        self._queues: defaultdict[int, Queue] = defaultdict(_started_queue)
        self._issued: list[Message] = []

    def issue(self, message: Message) -> Message:
        """Put a message on its group's stream."""
        self._issued = [other for other in self._issued if not other.is_completed()] + [message]
        self._queue_of(message).put((message, message.run))
        return message

    def after(self, message: Message) -> None:
        """Put what waits for a message on the stream that computes."""
        if self._one_queue:
            self._queue_of(message).put((message, message.done.wait))

    def _queue_of(self, message: Message) -> Queue:
        return self._queues[0 if self._one_queue else id(message.group)]

    def maybe_wait(self, *_: Any) -> None:
        """At a place where users, torch or its allocator may wait for the whole device."""
        if self._random.random() < self._share:
            self.wait()

    def wait(self) -> None:
        """``torch.cuda.synchronize()``: raises if a message does not end, as its counterpart comes after this wait."""
        for message in self._issued:
            message.end("a wait for the whole device")
        self._issued = []

    def check(self) -> None:
        """Raise what was found in the case that ran."""
        found, self.violations = self.violations, []
        if found:
            raise AssertionError(f"{len(found)} times: {found[0]}")


class Message:
    """Stands for the ``dist.Work`` of a ``"send"``, ``"receive"`` or ``"all-reduce"``, which has no peer."""

    def __init__(self, device: Device, kind: str, tensor: Tensor, peer: int, group: dist.ProcessGroup) -> None:
        if tensor.dtype not in _KNOWN_DTYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        self.kind, self.group, self.done = kind, group, threading.Event()
        self._device, self._tensor, self._peer = device, tensor.detach(), peer
        self._issued = time.monotonic()  # the same clock in all processes of a machine
        self._may_be_early = device.is_connecting  # two hosts at their first message, who wait for each other
        self._result: Tensor | None = None
        self._error: Exception | None = None
        if kind == "receive":
            _poison(self._tensor)

    def run(self) -> None:
        """What its stream does."""
        time.sleep(_SLOWEST_SECONDS * _delays.random())
        try:
            {"send": self._send, "receive": self._receive, "all-reduce": self._reduce}[self.kind]()
        except Exception as error:
            self._error = error
        self.done.set()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def end(self, who: str) -> None:
        """Let somebody wait for its end."""
        if not self.done.wait(HANG_SECONDS):
            raise RuntimeError(f"{who} hangs: {self.kind} was issued too early")

    def wait(self, timeout: object = None) -> bool:
        """Let what comes after it wait: here that is the host itself, but for a send."""
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
        """Itself, which has the one method of a future that is used."""
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
        running: dict[int, Message] = {}  # group -> the newest of its messages
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
    """Stands for ``torch.distributed`` in the modules that give tensors on devices to it."""

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
    """Let this process live by NCCL's rules from now on; returns what raises if the rules were broken.

    Args:
        rank: seeds the random moments.
        share_of_waits: probability of a wait for the whole device at every place where there may be one.
        one_queue: whether all streams share a hardware queue.
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
    if tensor.dtype == torch.uint8:  # the bytes of anything: NaN in all kinds of floats
        tensor.fill_(255)
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(99)

"""Counts, on CPUs, what would make the host wait for a GPU.

The device is ``cpu:0``, which torch treats as the CPU, and which the host's own tensors are not on: what was moved or
made there, and all that is computed from it, is marked as lying on the device. A marked tensor says that it is on
``cpu:0``, and that ``is_cuda``. These would wait:

* reading it: ``item()``, ``float()``, ``if tensor``, ``tolist()``, ``cpu()``, ``numpy()``, a copy to a host tensor;
* a copy to it from ordinary memory, also that in ``torch.tensor(..., device=)``, without ``non_blocking=True``;
* operations whose result has a shape that depends on it: ``nonzero``, a mask as an index, ``unique``;
* ``Event.synchronize()``. No event here has happened before somebody waits for it.

Two kinds of errors that only a GPU shows are noted as well: a host tensor among operands on the device, and reading
what is copied to the host before the copy's event. What is sent over sockets is read where it lies, on a CPU: that is
left out, as NCCL takes it from the device.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lightning_asyncpp

DEVICE = torch.device("cpu", 0)
_ROOTS = {f"{Path(str(package.__file__)).parent}/": package.__name__ for package in (lightning_asyncpp, lightning)}
_SHAPED_BY_VALUES = frozenset(
    ["nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive", "bincount", "_linalg_eigh"]
)
_READ_AT_ONCE = {getattr(Tensor, name): name for name in ("tolist", "numpy", "__array__")}
_FROM_HOST = frozenset([torch.tensor, torch.as_tensor, torch.asarray])
_BY_SOCKET = "core/wire/transport.py"
_UPDATES = "core/updates/update_queue.py"
_ON_BEHALF_OF_OTHERS = ("core/host_copies.py", "core/foreach.py")
_MAY_MIX = frozenset(["copy_", "_to_copy", "index", "index_put_", "set_", "lift_fresh", "_foreach_copy_"])


class Wait(NamedTuple):
    """A place where the host waits.

    Attributes:
        per: what it is part of: ``"microbatch"`` (its forward or its backward on a stage), ``"update"`` (its step, or
            what is done for it before all stages have agreed) or ``"mini-batch"``.
        what: the operation.
        place: the innermost function in this package or in Lightning, but for those that only help others to read.
    """

    per: str
    what: str
    place: str


class HostWaits:
    """Counts the waits of this thread, mixed operands and early reads, while :attr:`counting`."""

    def __init__(self) -> None:
        self.counting = False
        self._thread = threading.current_thread()  # others, which send copies when they are there, may wait
        self.waits: Counter[Wait] = Counter()
        self.mixed: Counter[Wait] = Counter()
        self.early: Counter[Wait] = Counter()
        self.recorded = self.reached = 0  # events on the stream, and which of them have happened

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Tell the device's tensors from the host's; a run begins and ends inside."""
        stream = _Stream(self)
        # To other devices than these Lightning copies without blocking.
        blocking = patch("lightning.fabric.utilities.apply_func._BLOCKING_DEVICE_TYPES", ("mps",))
        computing = patch("torch.cuda.current_stream", lambda *_: stream)
        copying = patch("lightning_asyncpp.core.host_copies._copy_stream", lambda _: stream)
        kept = patch.object(Tensor, "record_stream", lambda *_: None)
        with computing, copying, kept, patch("torch.cuda.stream", nullcontext), blocking:
            with _Operations(self), _Calls(self):
                yield

    def note(self, what: str, kind: Counter[Wait] | None = None) -> None:
        """Count a wait of the code that runs."""
        is_counted = self.counting and threading.current_thread() is self._thread
        if is_counted and not (wait := _where(what)).place.startswith(_BY_SOCKET):
            (self.waits if kind is None else kind)[wait] += 1

    def check_arrived(self, tensor: Tensor, what: str) -> None:
        """Note that a host tensor is read before an event has happened that was recorded after the copy to it."""
        if _get(tensor, "_arriving") > self.reached:
            self.note(what, self.early)


class _Stream:
    """Stands for the device's one ``torch.cuda.Stream``, on which everything happens in order."""

    def __init__(self, waits: HostWaits) -> None:
        self._waits = waits

    def wait_stream(self, other: _Stream) -> None:
        """It is this one."""

    def record_event(self) -> _Event:
        """An event behind all that was launched so far."""
        self._waits.recorded += 1
        return _Event(self._waits, self._waits.recorded)


class _Event:
    """Stands for a ``torch.cuda.Event``; ``place`` is that on the stream, from 1."""

    def __init__(self, waits: HostWaits, place: int) -> None:
        self._waits, self._place = waits, place

    def query(self) -> bool:
        """Whether what stands before it is done: if somebody has waited for it, or for what comes after it."""
        return self._place <= self._waits.reached

    def synchronize(self) -> None:
        """Wait for it."""
        if not self.query():
            self._waits.note("Event.synchronize")
            self._waits.reached = self._place


class _Operations(TorchDispatchMode):
    """Sees every operation, those of a backward as well."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        target = kwargs.get("device")
        name = func.overloadpacket.__name__
        is_there = any(map(is_on_device, given))
        if target is not None:
            # Casts name the device where the tensor is; what moves one to the host is seen by _Calls.
            is_there = _is_device(target) or (is_there and name == "_to_copy")
        self._note(name, args, kwargs, given)
        result = func(*args, **kwargs)
        if is_there:
            shared = {_key(tensor) for tensor in given}
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and _key(leaf) not in shared:
                    _set(leaf, "_on_device", True)
        return result

    def _note(self, name: str, args: Any, kwargs: Any, given: list[Tensor]) -> None:
        there = [is_on_device(tensor) for tensor in given]
        if name == "_local_scalar_dense":
            self._read(given[0], "item")
        elif name in _SHAPED_BY_VALUES and any(there):
            self._waits.note(name)
        elif name in ("index", "index_put_", "index_put", "_unsafe_index") and there[0]:
            if any(index.dtype in (torch.bool, torch.uint8) for index in given[1:]):
                self._waits.note("mask as index")
            elif not all(there):
                self._waits.note("host index")
        elif name == "copy_" and there[0] != there[1] and not _non_blocking(args, kwargs, 2):
            self._waits.note("copy_")
        elif name == "copy_" and there[1] and not there[0]:
            _set(given[0], "_arriving", self._waits.recorded + 1)
        elif name == "_to_copy" and not (kwargs.get("non_blocking") or there[0]) and _is_device(kwargs.get("device")):
            self._waits.note("copy")
        if any(there) and name not in _MAY_MIX and any(t.ndim and not on for t, on in zip(given, there)):
            self._waits.note(name, self._waits.mixed)

    def _read(self, tensor: Tensor, what: str) -> None:
        if is_on_device(tensor):
            self._waits.note(what)
        self._waits.check_arrived(tensor, what)


class _Calls(TorchFunctionMode):
    """Sees what is no operation on a CPU: reads of whole tensors, moves, and questions about the device."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return DEVICE if is_on_device(args[0]) else func(*args)
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return is_on_device(args[0])
        if func == Tensor.is_cpu.__get__:  # type: ignore[attr-defined]
            return not is_on_device(args[0]) and func(*args)
        kwargs.pop("pin_memory", None)
        if func is Tensor.pin_memory:
            return args[0]
        if func in _READ_AT_ONCE and _is_plain(args[0]):
            if is_on_device(args[0]):
                self._waits.note(_READ_AT_ONCE[func])
            self._waits.check_arrived(args[0], _READ_AT_ONCE[func])
        if func is Tensor.cpu:
            return self._to_host(args[0], lambda: args[0])
        if func is Tensor.to and _is_plain(args[0]):
            return self._to(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in _FROM_HOST and _is_device(kwargs.get("device")):
            if not (isinstance(args[0], Tensor) and is_on_device(args[0])):
                self._waits.note(f"{func.__name__}(..., device=)")
            put_on_device([result])
        return result

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        other = next((leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)), None)
        if other is not None:
            target: Any = DEVICE if is_on_device(other) else torch.device("cpu")
            rest = {key: value for key, value in kwargs.items() if value is not other}
            return self._to(tensor, target, other.dtype, *args[1:], **rest)
        named = [_as_device(value) for value in (*args, *kwargs.values())]
        target = next((device for device in named if device is not None), None)
        if target is None or target.type == "meta":
            return tensor.to(*args, **kwargs)
        if _is_device(target) and is_on_device(tensor):  # it is there already
            args = tuple(torch.device("cpu") if _as_device(value) else value for value in args)
            kwargs = {k: torch.device("cpu") if _as_device(value) else value for k, value in kwargs.items()}
            return tensor.to(*args, **kwargs)
        if _is_device(target):
            return tensor.to(*args, **kwargs)  # torch copies: see _Operations
        return self._to_host(tensor, lambda: tensor.to(*args, **kwargs), _non_blocking(args, kwargs, 2))

    def _to_host(self, tensor: Tensor, move: Callable[[], Tensor], non_blocking: bool = False) -> Tensor:
        if not is_on_device(tensor):
            return move()
        if not non_blocking:
            self._waits.note("copy")
        copy = move().clone()
        _set(copy, "_on_device", False)
        return copy


def is_on_device(tensor: Tensor) -> bool:
    """Whether a tensor would be on the GPU."""
    return bool(_get(tensor, "_on_device"))


def put_on_device(tensors: list[Tensor]) -> list[Tensor]:
    """Say of tensors that they are on the GPU."""
    for tensor in tensors:
        _set(tensor, "_on_device", True)
    return tensors


def _is_plain(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"


def _get(tensor: Tensor, name: str) -> int:
    return getattr(tensor.untyped_storage(), name, 0) if _is_plain(tensor) else 0


def _set(tensor: Tensor, name: str, value: int) -> None:
    if _is_plain(tensor):
        setattr(tensor.untyped_storage(), name, value)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if _is_plain(tensor) else 0


def _is_device(device: Any) -> bool:
    found = _as_device(device)
    return found is not None and found.type == "cpu" and found.index is not None


def _as_device(value: Any) -> torch.device | None:
    return torch.device(value) if isinstance(value, (str, torch.device)) else None


def _non_blocking(args: Any, kwargs: Any, position: int) -> bool:
    return bool(kwargs.get("non_blocking") or (len(args) > position and args[position] is True))


def _where(what: str) -> Wait:
    place, per = "elsewhere", "mini-batch"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        root = next((root for root in _ROOTS if path.startswith(root)), None)
        if root is not None:
            inside = f"{'' if _ROOTS[root] == 'lightning_asyncpp' else 'lightning/'}{path.removeprefix(root)}"
            # A comprehension has a frame in some versions of Python.
            is_named = not frame.f_code.co_name.startswith("<")
            if place == "elsewhere" and is_named and inside not in _ON_BEHALF_OF_OTHERS:
                place = f"{inside}:{frame.f_code.co_name}"
            is_run = inside.startswith("core/runner.py") and frame.f_code.co_name in ("forward", "backward")
            is_step = inside == _UPDATES and frame.f_code.co_name in ("_step_ahead", "_advance_and_step")
            per = "microbatch" if is_run else "update" if is_step else per
        frame = frame.f_back
    return Wait(per, what, place)

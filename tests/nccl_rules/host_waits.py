"""Counter, on CPUs, of the operations that would make the host wait for a GPU.

The fake device is ``cpu:0``, which torch treats as the CPU; the host's own tensors are on ``cpu``. Tensors moved to the
device or created there, and all tensors computed from them, are marked as on the device. A marked tensor reports the
device ``cpu:0``, and that ``is_cuda`` is true. The host would wait in these operations:

* reads of a marked tensor: ``item()``, ``float()``, ``if tensor``, ``tolist()``, ``cpu()``, ``numpy()``, host copies;
* copies from ordinary memory to the device, also in ``torch.tensor(..., device=)``, without ``non_blocking=True``;
* operations whose result's shape depends on a marked tensor's values: ``nonzero``, a mask as an index, ``unique``;
* ``Event.synchronize()``. Here an event has not happened until the host waits for it, or for a later one.

Two kinds of errors that only a GPU shows are counted as well: a host tensor among operands on the device, and a read of
a copy on the host before the copy's event. Reads by the socket transport do not count: here it reads marked tensors in
the CPU's memory, while NCCL sends them from the device.
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
    """Place where the host waits.

    Attributes:
        per: what the wait is part of: ``"microbatch"`` (its forward or its backward on a stage), ``"update"`` (its
            step, or work for it before all stages have agreed on it) or ``"mini-batch"``.
        what: operation that waits.
        place: innermost function of this package or of Lightning, except helpers that wait on behalf of others.
    """

    per: str
    what: str
    place: str


class HostWaits:
    """Counter of this thread's waits, mixed operands and early reads while :attr:`counting` is true."""

    def __init__(self) -> None:
        self.counting = False
        self._thread = threading.current_thread()  # other threads, which send copies once they are done, may wait
        self.waits: Counter[Wait] = Counter()
        self.mixed: Counter[Wait] = Counter()
        self.early: Counter[Wait] = Counter()
        self.recorded = self.reached = 0  # numbers of events recorded on the stream, and of events that have happened

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Distinguish the device's tensors from the host's inside this context, which must contain a whole run."""
        stream = _Stream(self)
        # Lightning copies without blocking to devices of all types except these.
        blocking = patch("lightning.fabric.utilities.apply_func._BLOCKING_DEVICE_TYPES", ("mps",))
        computing = patch("torch.cuda.current_stream", lambda *_: stream)
        copying = patch("lightning_asyncpp.core.host_copies._copy_stream", lambda _: stream)
        kept = patch.object(Tensor, "record_stream", lambda *_: None)
        with computing, copying, kept, patch("torch.cuda.stream", nullcontext), blocking:
            with _Operations(self), _Calls(self):
                yield

    def note(self, what: str, kind: Counter[Wait] | None = None) -> None:
        """Count a wait of the calling code; ``kind`` is another counter than :attr:`waits`."""
        is_counted = self.counting and threading.current_thread() is self._thread
        if is_counted and not (wait := _where(what)).place.startswith(_BY_SOCKET):
            (self.waits if kind is None else kind)[wait] += 1

    def check_arrived(self, tensor: Tensor, what: str) -> None:
        """Count an early read if no event that was recorded after the copy to this host tensor has happened yet."""
        if _get(tensor, "_arriving") > self.reached:
            self.note(what, self.early)


class _Stream:
    """Stand-in for the device's only ``torch.cuda.Stream``, on which everything happens in order."""

    def __init__(self, waits: HostWaits) -> None:
        self._waits = waits

    def wait_stream(self, other: _Stream) -> None:
        """Do nothing, since the other stream is this one."""

    def record_event(self) -> _Event:
        """Return an event behind all work launched so far."""
        self._waits.recorded += 1
        return _Event(self._waits, self._waits.recorded)


class _Event:
    """Stand-in for a ``torch.cuda.Event``; ``place`` is its number on the stream, from 1."""

    def __init__(self, waits: HostWaits, place: int) -> None:
        self._waits, self._place = waits, place

    def query(self) -> bool:
        """Return whether the event has happened, that is, whether the host has waited for it or for a later event."""
        return self._place <= self._waits.reached

    def synchronize(self) -> None:
        """Wait for the event; this is counted unless the event has happened."""
        if not self.query():
            self._waits.note("Event.synchronize")
            self._waits.reached = self._place


class _Operations(TorchDispatchMode):
    """Mode that observes every operation, including those of a backward."""

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
            # Casts name the tensor's current device; _Calls handles moves to the host.
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
    """Mode that observes what is not an operation on CPUs: reads of whole tensors, moves, and queries of the device."""

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
        if _is_device(target) and is_on_device(tensor):  # already on the device
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
    """Return whether a tensor would be on the GPU."""
    return bool(_get(tensor, "_on_device"))


def put_on_device(tensors: list[Tensor]) -> list[Tensor]:
    """Mark tensors as on the GPU, and return them."""
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
            # In some versions of Python, a comprehension has its own frame.
            is_named = not frame.f_code.co_name.startswith("<")
            if place == "elsewhere" and is_named and inside not in _ON_BEHALF_OF_OTHERS:
                place = f"{inside}:{frame.f_code.co_name}"
            is_run = inside.startswith("core/runner.py") and frame.f_code.co_name in ("forward", "backward")
            is_step = inside == _UPDATES and frame.f_code.co_name in ("_step_ahead", "_advance_and_step")
            per = "microbatch" if is_run else "update" if is_step else per
        frame = frame.f_back
    return Wait(per, what, place)

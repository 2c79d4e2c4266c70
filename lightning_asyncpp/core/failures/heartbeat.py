"""The two ends of the watch: rank 0 asks every other rank for a sign of life, and whoever hears nothing says so.

Each end has one thread, which sleeps nearly always and shares nothing with training, and connections of its own:
training waits in the others. A rank is gone if its connection is closed without a goodbye, or if no sign of life came
for the limit. Whatever goes wrong first, an error that a rank reports or a rank that is gone, rank 0 tells all; nothing
that comes later counts.
"""

from __future__ import annotations

import json
import selectors
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import cast

from typing_extensions import override

from lightning_asyncpp.core.failures.cause import Cause
from lightning_asyncpp.core.failures.heartbeat_wire import Kind, Wire
from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.ranks.rendezvous import Listener, call
from lightning_asyncpp.errors import ProtocolError

ENDED = "its process ended without an error of its own (killed, crashed, or out of memory?)"
_BEATS_PER_LIMIT = 6
_GATHER_SECONDS = 0.02  # in which answers come, so that they wake the thread of rank 0 but once
_END_SECONDS = 2.0
_AT_A_TIME = 64  # a listener each; files that a process may have open are few


def silent(limit: float) -> str:
    """Why a rank is thought to be gone of which nothing is heard."""
    return f"no sign of life for {limit:g} s: it was stopped, or its machine or the network is gone"


class End(ABC):
    """What both ends have in common.

    Args:
        wires: to the ranks at the other end, by rank.
        stages: of all ranks.
        limit: seconds without a sign of life after which a rank is gone.
        on_cause: called once, in this end's thread, when something went wrong on another rank.

    Attributes:
        cause: what went wrong first, if anything did.
        stopped: the process that gave no sign of life, if it is on this machine.
    """

    def __init__(
        self, wires: Mapping[int, Wire], stages: list[int], limit: float, on_cause: Callable[[Cause], None]
    ) -> None:
        self.cause: Cause | None = None
        self.stopped: int | None = None
        self._wires, self._stages, self._limit, self._on_cause = dict(wires), stages, limit, on_cause
        self._interval = limit / _BEATS_PER_LIMIT
        self._ending = False
        self._leaving: set[int] = set()
        self._all_leave = False
        self._known = threading.Event()
        self._decided = threading.Event()  # whether all leave, or something goes wrong before
        self._settling = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="asyncpp-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def wait_for_cause(self, seconds: float) -> Cause | None:
        """What went wrong first, waiting for it to be told."""
        self._known.wait(seconds)
        return self.cause

    def leave(self, seconds: float) -> bool:
        """Whether the scripts of all ranks want to end here; waits for the others to call this, too.

        Nothing that happens after that is wrong.
        """
        self._want_to_leave()
        self._decided.wait(seconds)
        with self._settling:
            self._leaving.clear()
            return self._all_leave

    def end(self) -> None:
        """Say goodbye and let go of everything; nobody is told of anything any more."""
        wires = list(self._wires.values())
        self._ending = True
        if self.cause is None:
            for wire in wires:
                wire.say_goodbye()
            self._thread.join(_END_SECONDS)  # until the others have heard it
        for wire in wires:
            wire.hang_up()
        self._thread.join(_END_SECONDS)
        for wire in wires:
            wire.close()

    @abstractmethod
    def report(self, cause: Cause) -> None:
        """Tell all ranks of an error of this one."""

    @abstractmethod
    def _want_to_leave(self) -> None: ...

    @abstractmethod
    def _hear_leave(self, rank: int) -> None: ...

    @abstractmethod
    def _run(self) -> None: ...

    def _settle(self, cause: Cause) -> bool:
        """Take it for what went wrong first, unless there is something already."""
        with self._settling:
            if self.cause is not None or self._ending or self._all_leave:
                return False
            self.cause = cause
        self._known.set()
        self._decided.set()
        return True

    def _hear(self, rank: int) -> Cause | Kind | None:
        """What a rank has to say: that it lives, goodbye, what went wrong, or half a message: None."""
        heard = None
        try:
            for message in self._wires[rank].receive():
                heard = message.kind
                if heard is Kind.CAUSE:
                    return Cause.unpack(message.body)
                if heard is Kind.GOODBYE:
                    return heard
                if heard is Kind.LEAVE:
                    self._hear_leave(rank)
                    heard = Kind.BEAT
        except TimeoutError:
            return None
        except (EOFError, OSError):
            return Kind.GOODBYE if self._ending or self._all_leave else self._gone(rank, ENDED)
        except ProtocolError as error:
            return self._gone(rank, f"its signs of life cannot be read: {error}")
        return heard

    def _silent(self, rank: int) -> Cause:
        self.stopped = self._wires[rank].process
        return self._gone(rank, silent(self._limit))

    def _gone(self, rank: int, why: str) -> Cause:
        return Cause(rank, self._stages[rank], why)


class Member(End):
    """The end of every rank but rank 0; ``wires`` holds the one to rank 0."""

    @override
    def report(self, cause: Cause) -> None:
        with suppress(OSError):  # rank 0 is gone, which this rank notices by itself
            self._wires[0].send(Kind.CAUSE, cause.pack())

    @override
    def _want_to_leave(self) -> None:
        with suppress(OSError):
            self._wires[0].send(Kind.LEAVE)

    @override
    def _hear_leave(self, rank: int) -> None:
        with self._settling:
            self._all_leave = self.cause is None
        self._decided.set()

    @override
    def _run(self) -> None:
        clock, last = _Clock(), 0.0
        heard: Cause | Kind | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._wires[0], selectors.EVENT_READ)
            while heard in (None, Kind.BEAT):
                ready = selector.select(self._interval)
                clock.advance(2 * self._interval)
                heard = self._hear(0) if ready else None
                if heard is Kind.BEAT:
                    last = clock.awake
                    with suppress(OSError):
                        self._wires[0].send(Kind.BEAT)
                elif heard is None and clock.awake - last > self._limit:
                    heard = self._silent(0)
        if heard is Kind.GOODBYE:
            self._wires[0].close()
        elif isinstance(heard, Cause) and self._settle(heard):
            self._on_cause(heard)


class Hub(End):
    """The end of rank 0; ``wires`` holds those to all other ranks."""

    @override
    def report(self, cause: Cause) -> None:
        if self._settle(cause):
            self._tell_all(cause)

    @override
    def _want_to_leave(self) -> None:
        self._hear_leave(0)

    @override
    def _hear_leave(self, rank: int) -> None:
        with self._settling:
            self._leaving.add(rank)
            decided = self._all_leave or self.cause is not None
            if decided or len(self._leaving) < len(self._stages):
                return
            self._all_leave = True
        for wire in self._wires.values():
            with suppress(OSError):
                wire.send(Kind.LEAVE)
        self._decided.set()

    @override
    def _run(self) -> None:
        clock, last, next_beat = _Clock(), dict.fromkeys(self._wires, 0.0), 0.0
        with selectors.DefaultSelector() as selector:
            for rank, wire in self._wires.items():
                selector.register(wire, selectors.EVENT_READ, rank)
            while last and self.cause is None:
                if clock.awake >= next_beat and not self._ending:
                    self._ask(last)
                    next_beat = clock.awake + self._interval
                ready = selector.select(max(0.0, next_beat - clock.awake))
                clock.advance(2 * self._interval)
                for key, _ in ready:
                    rank = cast(int, key.data)
                    heard = self._hear(rank)
                    if heard is Kind.BEAT:
                        last[rank] = clock.awake
                    elif heard is Kind.GOODBYE:
                        selector.unregister(key.fileobj)
                        self._wires[rank].close()
                        del last[rank]
                    elif isinstance(heard, Cause):
                        self._lose(heard)
                if not self._ending and (late := [r for r, then in last.items() if clock.awake - then > self._limit]):
                    self._lose(self._silent(late[0]))

    def _ask(self, ranks: Mapping[int, float]) -> None:
        for rank in ranks:
            with suppress(OSError):  # then it is gone, or stopped
                self._wires[rank].send(Kind.BEAT)
        time.sleep(_GATHER_SECONDS)

    def _lose(self, cause: Cause) -> None:
        if self._settle(cause):
            self._tell_all(cause)
            self._on_cause(cause)

    def _tell_all(self, cause: Cause) -> None:
        for wire in self._wires.values():
            with suppress(OSError):
                wire.send(Kind.CAUSE, cause.pack())


def meet(mesh: Mesh, limit: float, on_cause: Callable[[Cause], None]) -> End:
    """Connect this rank's end; a collective call.

    Args:
        mesh: this rank's place, of several; its groups are connected.
        limit: seconds without a sign of life after which a rank is gone.
        on_cause: called once, in a thread, when something went wrong on another rank.

    Raises:
        PeerLostError: a rank cannot be reached.
    """
    wires: dict[int, Wire] = {}
    for first in range(1, mesh.world_size, _AT_A_TIME):
        wires |= _meet(mesh, range(first, min(first + _AT_A_TIME, mesh.world_size)))
    stages = [mesh.stage_of(rank) for rank in range(mesh.world_size)]
    return (Member if mesh.rank else Hub)(wires, stages, limit, on_cause)


class _Clock:
    """The time in which this process was awake.

    Where all were stopped and went on, as on a laptop that slept or after Ctrl-Z, nobody was silent meanwhile.

    Attributes:
        awake: seconds.
    """

    def __init__(self) -> None:
        self.awake = 0.0
        self._before = time.monotonic()

    def advance(self, most: float) -> None:
        """Count what has passed, but not more than ``most`` seconds."""
        now = time.monotonic()
        self.awake += min(now - self._before, most)
        self._before = now


def _meet(mesh: Mesh, ranks: range) -> dict[int, Wire]:
    """Connect some of the ranks with rank 0: each is known by the secret of the listener that it calls."""
    with ExitStack() as closing:
        listeners = {} if mesh.rank else {rank: closing.enter_context(Listener()) for rank in ranks}
        offers = exchange(mesh, json.dumps([listener.offer for listener in listeners.values()]))[0]
        if mesh.rank in ranks:
            offer = json.loads(offers)[mesh.rank - ranks.start]
            return {0: Wire(call(offer, _name(mesh, 0), _name(mesh, mesh.rank)))}
        return {rank: Wire(listener.answer(_name(mesh, rank))) for rank, listener in listeners.items()}


def _name(mesh: Mesh, rank: int) -> str:
    return f"rank {rank} (stage {mesh.stage_of(rank)})"

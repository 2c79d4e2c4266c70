"""Records a part of a training on every rank: from one mini-batch to another, waits for the loader included.

An engine may have several readers: the first makes it record, the last lets it stop.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lightning_asyncpp.core.engine import Engine
from lightning_asyncpp.core.ranks.agreement import agree_on_error, exchange
from lightning_asyncpp.core.recording.clock_offsets import clock_offset, host_name
from lightning_asyncpp.core.recording.clocks import Moment
from lightning_asyncpp.core.recording.trace import Beside, Follower, Recorded, Trace, Wait, take_ended
from lightning_asyncpp.core.recording.trace_file import PATTERN, Meta, SpanFile, file_name
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.settings import is_whole
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.version import __version__

WRITE_EVERY = 0.25
"""Seconds between two writes: what a killed run may lose."""
_END_SECONDS = 1.0
"""How long a pause or an end of the recording waits for a device to come to what was launched."""


@dataclass(frozen=True)
class Window:
    """Which mini-batches of a run are recorded.

    Attributes:
        first: the first one, counted over the run from 0.
        count: how many; None for all that follow.
    """

    first: int = 0
    count: int | None = None

    def problems(self) -> list[str]:
        """What is wrong with it, each with its mend, under the names that users give the values."""
        problems = []
        if not (is_whole(self.first) and self.first >= 0):
            problems.append(f"first_mini_batch={self.first!r} must be a whole number, 0 or more: they count from 0")
        if self.count is not None and not (is_whole(self.count) and self.count >= 1):
            problems.append(f"mini_batches={self.count!r} must be at least 1; leave it out to record to the end")
        return problems


class Recorder:
    """Writes what this rank does into a file of a folder that all ranks share; made by a collective call on all ranks.

    The loop says when a batch begins and when it is over; what lies between is time in which the next one is fetched.

    Args:
        session: the pipeline, started.
        folder: where the files go; with files of another recording in it, beside it under the name ``<folder>-2``, ...
        window: which mini-batches are recorded.

    Attributes:
        folder: where this recording's files are.

    Raises:
        ConfigurationError: on every rank; the window makes no sense, or a rank cannot write there.
    """

    def __init__(self, session: PipelineSession, folder: Path, window: Window = Window()) -> None:
        if problems := window.problems():
            raise ConfigurationError.from_problems(problems)
        self._window = window
        self._engine = session.running()
        self._clock = self._engine.runner.clock
        mesh = self._engine.mesh
        self.folder = Path(exchange(mesh, str(unused(folder)) if mesh.rank == 0 else "")[0])
        self._file = self._open()
        self._follower: Follower | None = None
        self._batch_since: Moment = 0.0
        self._noted: tuple[int, int] | None = None  # the newest mini-batch whose start was noted
        self._begun: deque[tuple[int, int, Moment]] = deque()  # whose moment is still to come
        self._own: deque[Recorded] = deque()
        self._waiting_since: Moment | None = None
        self._waiting_for: Wait | Beside = Wait.DATA
        self._written = 0.0
        self._evaluating_since: Moment = 0.0
        self._closed = False
        # By a weak reference: a recording that nobody holds any more must not keep its engine alive.
        self._at_exit = partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    def begin_batch(self) -> None:
        """The next training batch is there and is run now."""
        now = self._clock.now()
        self._end_waiting(now)
        self._waiting_for = Wait.DATA
        self._note_begun()
        self._batch_since = now
        mini_batch = self._engine.mini_batch
        if self._closed:
            return
        if self._window.count is not None and mini_batch >= self._window.first + self._window.count:
            self.close()
        elif self._follower is None and mini_batch >= self._window.first:
            self._follower = follow(self._engine)
            for begun in self._new_starts():  # whose backwards may still come
                self._file.begin_batch(*begun, None)

    def end_batch(self) -> None:
        """The training batch is over: what follows is the way to the next one."""
        self._note_begun()
        self._waiting_since = self._clock.now()
        if self._follower is not None and time.perf_counter() - self._written >= WRITE_EVERY:
            self.write()

    def note_checkpoint(self) -> None:
        """A checkpoint is saved: until the next batch begins time passes for it, not for the loader."""
        self._waiting_for = Beside.CHECKPOINT

    def stop_waiting(self) -> None:
        """What follows is no way to the next batch: an epoch ends."""
        self._end_waiting(self._clock.now())

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model is evaluated meanwhile, which is no part of the trace."""
        self.begin_evaluation()
        try:
            yield
        finally:
            self.end_evaluation()

    def begin_evaluation(self) -> None:
        """An evaluation begins, which is no part of the trace."""
        self._end_waiting(self._clock.now())
        if self._follower is not None:
            self.write(_END_SECONDS)
        self._evaluating_since = self._clock.now()

    def end_evaluation(self) -> None:
        """The evaluation is over."""
        now = self._clock.now()
        if self._follower is not None:
            self._follower.skip()
            self._own.append(Recorded(Beside.EVALUATE, self._engine.mini_batch, self._evaluating_since, now))
        self._waiting_since = now

    def write(self, seconds: float = 0.0) -> None:
        """Write what has ended so far.

        Args:
            seconds: that a device is given to come to what was launched.
        """
        if self._follower is not None:
            self._note_begun()
            spans = self._follower.take_all(seconds) if seconds else self._follower.take()
            self._write_begun()
            self._file.add([*take_ended(self._own, self._clock), *spans])
            self._written = time.perf_counter()

    def close(self) -> None:
        """Write the rest and end the file; may be called twice."""
        if self._closed:
            return
        self.write(_END_SECONDS)
        self._closed = True
        self._file.close(time.perf_counter())
        if self._follower is not None:
            self._follower.close()
            self._follower = None
        atexit.unregister(self._at_exit)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_waiting(self, now: Moment) -> None:
        if self._waiting_since is not None and self._follower is not None:
            self._own.append(Recorded(self._waiting_for, self._engine.mini_batch, self._waiting_since, now))
        self._waiting_since = None

    def _note_begun(self) -> None:
        """Note the mini-batches that began in this batch; not before its step: one may begin anew in that."""
        if self._follower is not None:
            self._begun.extend((*start, self._batch_since) for start in self._new_starts())
            self._write_begun()

    def _new_starts(self) -> list[tuple[int, int]]:
        begun = self._engine.updates.begun(self._engine.next_forward)
        known = begun.index(self._noted) + 1 if self._noted in begun else 0
        self._noted = begun[-1] if begun else None
        return begun[known:]

    def _write_begun(self) -> None:
        while self._begun and (time := self._clock.when(self._begun[0][2])) is not None:
            mini_batch, first, _ = self._begun.popleft()
            self._file.begin_batch(mini_batch, first, time)

    def _open(self) -> SpanFile:
        mesh, settings, schedule = self._engine.mesh, self._engine.settings, self._engine.schedule
        rule = schedule.stage_rule
        offset = clock_offset(mesh)
        meta = Meta(
            mesh.rank, mesh.stage, mesh.replica, mesh.num_stages, mesh.num_replicas, settings.micro_batches,
            settings.lookahead, rule.delay, host_name().split()[0], time.perf_counter(), offset.seconds,
            offset.error, time.time(), __version__, torch.__version__, rule.synchronous_start,
            len(self._engine.runner.stage.units), rule.held, schedule.staleness, schedule.slack, schedule.shares_with,
        )  # fmt: skip
        file, error = None, None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = SpanFile(self.folder / file_name(mesh.rank), meta)
        except OSError as caught:
            error = ConfigurationError(
                f"the trace cannot be written to {str(self.folder)!r} ({caught.strerror}): name a folder that every"
                " process may write to"
            )
        agree_on_error(mesh, error)
        assert file is not None
        return file


def follow(engine: Engine) -> Follower:
    """Let an engine record from here on, if it does not do so yet, and read along.

    The engine stops to record when the last such reader is closed; a trace that somebody else put there stays.
    """
    runner = engine.runner
    trace = runner.trace
    if trace is None:
        trace = runner.trace = Trace(engine.mesh.stage, keep=False, clock=runner.clock)
    follower = trace.follow()

    def stop() -> None:
        if runner.trace is trace and not trace.keep and not trace.is_followed:
            runner.trace = None

    follower.on_close = stop
    return follower


def unused(folder: Path) -> Path:
    """``folder`` itself, or with the first number behind its name under which nothing was recorded yet."""
    number, free = 2, folder
    while any(free.glob(PATTERN)):
        free, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return free


def _close(reference: weakref.ref[Recorder]) -> None:
    if (recorder := reference()) is not None:
        recorder.close()

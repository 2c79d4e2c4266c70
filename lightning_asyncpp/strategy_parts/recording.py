"""Recording of a run: every rank writes a file with its spans (timed activities) in and between some mini-batches.

The files are in Chrome's trace format, which ui.perfetto.dev loads.
"""

from __future__ import annotations

import json
import socket
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_asyncpp.core.engine import Engine
from lightning_asyncpp.core.ranks.agreement import agree_on_error, all_gather_object
from lightning_asyncpp.core.schedule import Kind, Schedule, StalenessRule
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.trace import Activity, Moment, Reader, Span, SpanKind, Trace, Wait
from lightning_asyncpp.errors import ConfigurationError

PATTERN = "rank-*.json"
PER_MICROBATCH = frozenset({Kind.FORWARD, Kind.BACKWARD, Wait.ACTIVATION, Wait.GRADIENT, Activity.SEND})
NAMES: dict[SpanKind, str] = {
    Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update", Wait.ACTIVATION: "wait for activation",
    Wait.GRADIENT: "wait for gradient", Wait.AGREEMENT: "wait for agreement", Wait.DATA: "wait for data",
    Activity.SEND: "send", Activity.REDUCE: "reduce", Activity.PENDING: "update pending", Activity.DRAIN: "drain",
    Activity.EVALUATE: "validation", Activity.CHECKPOINT: "checkpoint",
}  # fmt: skip
THREADS = ("work", "waits", "messages", "updates under way", "drains and pauses")


def thread_of(kind: SpanKind) -> int:
    """Return the number of the row, from 1, in which spans of a kind are shown."""
    rows = {Wait.DATA: 5, Activity.SEND: 3, Activity.REDUCE: 4, Activity.PENDING: 4}
    return rows.get(kind, 1 if isinstance(kind, Kind) else 2 if isinstance(kind, Wait) else 5)


@dataclass(frozen=True)
class Meta:
    """Description of the rank that wrote a file.

    Attributes:
        rank: rank in the world of all processes.
        replica: index of the replica of the pipeline.
        num_replicas: number of replicas.
        layers: number of layers of this stage.
        host: name of the machine.
        schedule: schedule of the stage.
    """

    rank: int
    replica: int
    num_replicas: int
    layers: int
    host: str
    schedule: Schedule

    @property
    def process(self) -> int:
        """Number of the rank's process in the picture, from 1."""
        return self.replica * self.schedule.num_stages + self.schedule.stage + 1

    @property
    def name(self) -> str:
        """Name of the stage in tables and pictures."""
        return (f"r{self.replica} " if self.num_replicas > 1 else "") + f"stage {self.schedule.stage}"

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Meta:
        """Build the description from a file's content."""
        schedule = dict(content["schedule"])
        rule = schedule["pipeline_rule"]  # its third field is None, and has another name in older files
        schedule["pipeline_rule"] = StalenessRule(rule["delay"], rule["synchronous_start"])
        return cls(**{**content, "schedule": Schedule(**schedule)})


def about(meta: Meta) -> list[dict[str, Any]]:
    """Return the events that name a rank's process and its rows."""
    events: list[dict[str, Any]] = [
        {"name": "asyncpp", "args": asdict(meta)},
        {"name": "process_name", "args": {"name": f"{meta.name} (rank {meta.rank}, {meta.host})"}},
        {"name": "process_sort_index", "args": {"sort_index": meta.process}},
        *({"name": "thread_name", "tid": row, "args": {"name": name}} for row, name in enumerate(THREADS, 1)),
    ]
    return [{"ph": "M", "pid": meta.process, **event} for event in events]


def event(span: Span, process: int, mini_batch_of: Callable[[int], tuple[int, int]], offset: float = 0.0) -> str:
    """Return a span as an event in JSON, without the json module, which takes ten times as long.

    Args:
        span: the span.
        process: number of the process that recorded the span.
        mini_batch_of: microbatch -> (its mini-batch, its position in the mini-batch).
        offset: seconds to add to the span's times.
    """
    mini_batch, place = mini_batch_of(span.index) if span.kind in PER_MICROBATCH else (span.index, 0)
    return (
        f'{{"ph":"X","name":"{NAMES[span.kind]} {span.index}","cat":"{span.kind.value}","pid":{process}'
        f',"tid":{thread_of(span.kind)},"ts":{(span.start + offset) * 1e6:.3f}'
        f',"dur":{(span.end - span.start) * 1e6:.3f},"args":{{"index":{span.index},"mini_batch":{mini_batch}'
        f',"place":{place},"version":{span.version},"bytes":{span.num_bytes}}}}}'
    )


class TraceFile:
    """File of the spans of one rank.

    Args:
        path: path of the file, which must not exist.
        meta: description of the rank.
        offset: seconds to add to this process's clock.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, meta: Meta, offset: float = 0.0) -> None:
        self._meta, self._offset = meta, offset
        self._file = open(path, "x", encoding="utf-8")  # noqa: SIM115 - open as long as the recording
        self._file.write("[\n" + "".join(f"{json.dumps(event)},\n" for event in about(meta)))

    def add(self, spans: Iterable[Span], mini_batch_of: Callable[[int], tuple[int, int]]) -> None:
        """Write spans and flush the file.

        Args:
            spans: spans that have ended.
            mini_batch_of: microbatch -> (its mini-batch, its position in the mini-batch).
        """
        process, offset = self._meta.process, self._offset
        self._file.write("".join(f"{event(span, process, mini_batch_of, offset)},\n" for span in spans))
        self._file.flush()

    def close(self) -> None:
        """End the file; may be called twice."""
        self._file.close()


_WRITE_EVERY = 0.25  # seconds between writes; a killed run may lose the spans of this time
_END_SECONDS = 1.0  # longest wait, in seconds, for a device to finish its work at the end of a recording


class Recorder:
    """Recorder that writes this rank's spans to a file; its constructor is a collective call.

    The training loop calls :meth:`begin_batch` and :meth:`end_batch`. The time between two batches counts as a wait for
    data.

    Args:
        session: the started pipeline.
        folder: folder of all ranks' files; if it has a recording already, ``<folder>-2``, ... is used.
        first: first mini-batch to record.
        count: number of mini-batches to record; ``None``: all that follow.

    Attributes:
        folder: folder of this recording's files.

    Raises:
        ConfigurationError: a rank cannot write to the folder; raised on every rank.
    """

    def __init__(self, session: PipelineSession, folder: Path, first: int = 0, count: int | None = None) -> None:
        self._first, self._count, self._engine = first, count, session.running()
        mesh = self._engine.mesh
        given = json.dumps([str(unused(folder)), time.time()]) if mesh.rank == 0 else ""
        where, zero = json.loads(all_gather_object(mesh, given)[0])
        self.folder = Path(where)
        self._file = self._open(zero)
        self._reader: Reader | None = None
        self._starts: list[tuple[int, int]] = []  # mini-batch and its first microbatch
        self._pause: tuple[SpanKind, Moment] | None = None  # kind and start of the pause between two batches
        self._written = 0.0
        self._closed = False

    def begin_batch(self) -> None:
        """Record the start of a training batch, and the end of the wait for its data."""
        self.end_pause()
        mini_batch = self._engine.mini_batch
        if self._closed or mini_batch < self._first:
            return
        if self._count is not None and mini_batch >= self._first + self._count:
            self.close()
        elif self._reader is None:
            self._reader = follow(self._engine)
            self._note_starts()  # backwards of earlier mini-batches may still run

    def end_batch(self) -> None:
        """Record the end of a training batch, and the start of the wait for the next one."""
        self.begin_pause(Wait.DATA)
        self._note_starts()
        if self._reader is not None and time.perf_counter() - self._written >= _WRITE_EVERY:
            self.write()

    def note_checkpoint(self) -> None:
        """Label the pause until the next batch as time for a checkpoint, not as a wait for data."""
        if self._pause is not None:
            self._pause = Activity.CHECKPOINT, self._pause[1]

    def begin_pause(self, kind: SpanKind) -> None:
        """Begin a pause (evaluation or wait for data), which lasts until the next pause or batch."""
        self.end_pause()
        self._pause = kind, self._engine.runner.clock.now()

    def end_pause(self) -> None:
        """Record the pause, if there is one."""
        trace = self._engine.runner.trace
        if self._pause is not None and self._reader is not None and trace is not None:
            kind, since = self._pause
            trace.record(kind, self._engine.mini_batch, since, trace.clock.now())
        self._pause = None

    def write(self, seconds: float = 0.0) -> None:
        """Write the spans that have ended; wait up to ``seconds`` for those that a device has not completed."""
        if self._reader is not None:
            self._note_starts()
            self._file.add(self._reader.take(seconds=seconds), self._mini_batch_of)
            self._written = time.perf_counter()

    def close(self) -> None:
        """Write the rest and end the file; may be called twice."""
        self.write(_END_SECONDS)
        self._file.close()
        self._closed = True
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note_starts(self) -> None:
        if self._reader is not None:
            begun = self._engine.updates.begun(self._engine.next_forward)
            self._starts += [start for start in begun if not self._starts or start[1] > self._starts[-1][1]]

    def _mini_batch_of(self, k: int) -> tuple[int, int]:
        at = max(0, bisect_right(self._starts, k, key=lambda start: start[1]) - 1)
        mini_batch, first = self._starts[at]
        return mini_batch, k - first

    def _open(self, zero: float) -> TraceFile:
        mesh = self._engine.mesh
        meta = Meta(
            mesh.rank, mesh.replica, mesh.num_replicas, len(self._engine.runner.stage.units), socket.gethostname(),
            self._engine.schedule,
        )  # fmt: skip
        # Hosts' times of day differ only by clock errors; performance counters have arbitrary origins.
        offset = time.time() - zero - time.perf_counter()
        file, error = None, None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = TraceFile(self.folder / f"rank-{mesh.rank:05d}.json", meta, offset)
        except OSError as caught:
            error = ConfigurationError(
                f"the trace cannot be written to {str(self.folder)!r} ({caught.strerror}); choose a folder that every"
                " process may write to"
            )
        agree_on_error(mesh, error)
        assert file is not None
        return file


def follow(engine: Engine) -> Reader:
    """Return a reader of an engine's trace; the engine begins to record if it does not record yet.

    The engine stops recording when the last reader is closed.
    """
    runner = engine.runner
    trace = runner.trace
    if trace is None:
        trace = runner.trace = Trace(runner.clock)
    reader = trace.read()

    def stop() -> None:
        if not trace.readers:
            runner.trace = None

    reader.on_close = stop
    return reader


def unused(folder: Path) -> Path:
    """Return the first of ``folder``, ``<folder>-2``, ``<folder>-3``, ... that has no recording."""
    number, free = 2, folder
    while any(free.glob(PATTERN)):
        free, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return free

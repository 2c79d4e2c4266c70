"""The file of one rank: its spans as events of Chrome's trace format, which ui.perfetto.dev loads.

    [
    {"ph":"M","name":"asyncpp","pid":4,"args":{"rank":0,"replica":0,...}},                   whose file it is
    {"ph":"X","name":"forward 48","cat":"F","pid":4,"tid":1,"ts":1.2,"dur":8.5,"args":{...}},

Times are microseconds of rank 0's ``time.perf_counter``, so files of several ranks need only be put together. A line is
an event, and lines are only ever added: a killed run leaves everything but its last moments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from lightning_asyncpp.core.schedule import Kind, Schedule, StalenessRule
from lightning_asyncpp.core.trace import Beside, Span, SpanKind, Wait

PATTERN = "rank-*.json"
PER_MICRO_BATCH = frozenset({Kind.FORWARD, Kind.BACKWARD, Wait.ACTIVATION, Wait.GRADIENT, Beside.SEND})
NAMES: dict[SpanKind, str] = {
    Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update", Wait.ACTIVATION: "wait for activation",
    Wait.GRADIENT: "wait for gradient", Wait.AGREEMENT: "wait for agreement", Wait.DATA: "wait for data",
    Beside.SEND: "send", Beside.REDUCE: "reduce", Beside.PENDING: "update pending", Beside.DRAIN: "drain",
    Beside.EVALUATE: "validation", Beside.CHECKPOINT: "checkpoint",
}  # fmt: skip
THREADS = ("work", "waits", "messages", "updates under way", "drains and pauses")


def thread_of(kind: SpanKind) -> int:
    """Return the row, from 1, that spans of a kind are shown in."""
    rows = {Wait.DATA: 5, Beside.SEND: 3, Beside.REDUCE: 4, Beside.PENDING: 4}
    return rows.get(kind, 1 if isinstance(kind, Kind) else 2 if isinstance(kind, Wait) else 5)


@dataclass(frozen=True)
class Meta:
    """Whose spans a file holds.

    Attributes:
        rank: in the world of all processes.
        replica: of the pipeline.
        num_replicas: number of replicas.
        layers: how many layers this stage has.
        host: name of the machine.
        clock_error: seconds by which times may be off those of rank 0.
        schedule: of the stage.
    """

    rank: int
    replica: int
    num_replicas: int
    layers: int
    host: str
    clock_error: float
    schedule: Schedule

    @property
    def process(self) -> int:
        """Number of the process that stands for the stage in the picture, from 1."""
        return self.replica * self.schedule.num_stages + self.schedule.stage + 1

    @property
    def name(self) -> str:
        """Name of the stage in tables and pictures."""
        return (f"r{self.replica} " if self.num_replicas > 1 else "") + f"stage {self.schedule.stage}"

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Meta:
        """Build it from what a file holds."""
        schedule = dict(content["schedule"])
        schedule["pipeline_rule"] = StalenessRule(**schedule["pipeline_rule"])
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
    """Return a span as an event. By hand, because the json module takes ten times as long.

    Args:
        span: the span.
        process: that it belongs to.
        mini_batch_of: microbatch -> its mini-batch, and its place there.
        offset: seconds to add to its times.
    """
    mini_batch, place = mini_batch_of(span.index) if span.kind in PER_MICRO_BATCH else (span.index, 0)
    return (
        f'{{"ph":"X","name":"{NAMES[span.kind]} {span.index}","cat":"{span.kind.value}","pid":{process}'
        f',"tid":{thread_of(span.kind)},"ts":{(span.start + offset) * 1e6:.3f}'
        f',"dur":{(span.end - span.start) * 1e6:.3f},"args":{{"index":{span.index},"mini_batch":{mini_batch}'
        f',"place":{place},"version":{span.version},"bytes":{span.num_bytes}}}}}'
    )


class TraceFile:
    """Writes the spans of one rank.

    Args:
        path: of the file, which must not exist.
        meta: whose it is.
        offset: seconds to add to this process's clock.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, meta: Meta, offset: float = 0.0) -> None:
        self._meta, self._offset = meta, offset
        self._file: TextIO | None = open(path, "x", encoding="utf-8")  # noqa: SIM115 - open as long as the recording
        self._file.write("[\n" + "".join(f"{json.dumps(event)},\n" for event in about(meta)))

    def add(self, spans: Iterable[Span], mini_batch_of: Callable[[int], tuple[int, int]]) -> None:
        """Write spans and hand them to the operating system.

        Args:
            spans: what has ended.
            mini_batch_of: microbatch -> its mini-batch, and its place there.
        """
        if self._file is not None:
            process, offset = self._meta.process, self._offset
            self._file.write("".join(f"{event(span, process, mini_batch_of, offset)},\n" for span in spans))
            self._file.flush()

    def close(self) -> None:
        """End the file; may be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

"""The file of one rank: a line that says whose it is, then a short line for every span, written as the run goes.

    {"format": "asyncpp trace", "version": 1, "rank": 0, "stage": 3, ...}
    ["batch", 11, 44, null]                           mini-batch 11 began with micro-batch 44, before the recording
    ["batch", 12, 48, 1000]                           mini-batch 12 begins with micro-batch 48, at 1000 ns
    ["F", 48, 1200, 9700, 11, 0]                      kind, index, start, end (ns), weight version, bytes
    ["end", 99000]                                    the recording ended as it should, at 99000 ns

Times are nanoseconds since ``origin``, which is in seconds of the process's own clock; ``clock_offset`` more is the
same moment on rank 0's. A mini-batch whose gradient was dropped begins anew, with a line of its own. Lines are only
ever added, so that a killed run leaves everything but its last moments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from lightning_asyncpp.core.recording.trace import Span
from lightning_asyncpp.core.schedule import Slack, Staleness, StalenessRule

FORMAT, VERSION = "asyncpp trace", 1
BATCH, END = "batch", "end"
PATTERN = "rank-*.jsonl"


@dataclass(frozen=True)
class Meta:
    """Whose spans a file holds.

    Attributes:
        rank: in the world of all processes.
        stage, replica: where it stands; ``num_stages`` and ``num_replicas`` say among how many.
        micro_batches: per batch, m.
        lookahead: extra micro-batches in flight.
        delay: updates between the weights of a gradient and those that it is applied to, on this stage.
        host: name of the machine.
        origin: what the times of the file count from, in seconds of the process's own clock.
        clock_offset: seconds from that clock to rank 0's.
        clock_error: by how much that may be wrong, in seconds.
        started: when the recording began, in seconds since 1970.
        package, torch: versions.
        synchronous_start: number of mini-batches at the beginning of the run without delay.
        layers: how many layers of the model this stage has; 0 if it is not known.
        held: how many micro-batches, the first of a mini-batch, the delay is for; None: all.
        staleness, slack: of the stage's :class:`Schedule`; None in recordings from before they were noted.
        shares_with: likewise; None also where the stage shares no parameter.
    """

    rank: int
    stage: int
    replica: int
    num_stages: int
    num_replicas: int
    micro_batches: int
    lookahead: int
    delay: int
    host: str
    origin: float
    clock_offset: float
    clock_error: float
    started: float
    package: str
    torch: str
    synchronous_start: int = 0
    layers: int = 0
    held: int | None = None
    staleness: Staleness | None = None
    slack: Slack | None = None
    shares_with: int | None = None

    @property
    def stage_rule(self) -> StalenessRule:
        """Which weights this stage was to run on."""
        return StalenessRule(self.delay, self.synchronous_start, self.held)


def file_name(rank: int) -> str:
    """Name of a rank's file in the folder of a run."""
    return f"rank-{rank:05d}.jsonl"


class SpanFile:
    """Writes the spans of one rank.

    Args:
        path: of the file, which must not exist.
        meta: its first line.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, meta: Meta) -> None:
        self._origin = meta.origin
        self._file: TextIO | None = open(path, "x", encoding="utf-8")  # noqa: SIM115 - open as long as the recording
        self._write([json.dumps({"format": FORMAT, "version": VERSION, **asdict(meta)})])

    def begin_batch(self, mini_batch: int, first: int, time: float | None) -> None:
        """Note which micro-batch is the first of a mini-batch, and when it began.

        Args:
            mini_batch: which.
            first: its first micro-batch.
            time: in seconds of the process's clock; None if it began before the recording.
        """
        self._write([f'["{BATCH}",{mini_batch},{first},{"null" if time is None else self._ns(time)}]'])

    def add(self, spans: Iterable[Span]) -> None:
        """Write spans and hand them to the operating system: they are safe if the process dies."""
        ns = self._ns
        # By hand, because it is ten times faster than the json module.
        self._write(
            [f'["{s.kind.value}",{s.index},{ns(s.start)},{ns(s.end)},{s.version},{s.num_bytes}]' for s in spans]
        )

    def close(self, time: float) -> None:
        """End the file; may be called twice."""
        if self._file is not None:
            self._write([f'["{END}",{self._ns(time)}]'])
            self._file.close()
            self._file = None

    def _write(self, lines: list[str]) -> None:
        if lines and self._file is not None:
            self._file.write("\n".join(lines) + "\n")
            self._file.flush()

    def _ns(self, time: float) -> int:
        return round((time - self._origin) * 1e9)

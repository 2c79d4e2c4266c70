"""The trace event format that ui.perfetto.dev and Chrome's about:tracing read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_asyncpp.pipeline.schedule import Kind
from lightning_asyncpp.pipeline.trace import Beside, Span, Wait
from lightning_asyncpp.tools.trace.run import PER_MICRO_BATCH, RankTrace, RecordedRun
from lightning_asyncpp.tools.trace.summary import Summary

Event = dict[str, Any]

_THREADS = {1: "work", 2: "waits", 3: "messages", 4: "reductions", 5: "drains and pauses"}
_THREAD_OF: dict[Kind | Wait | Beside, int] = {
    **dict.fromkeys(Kind, 1), **dict.fromkeys(Wait, 2), Beside.SEND: 3, Beside.REDUCE: 4, Beside.DRAIN: 5,
    Beside.EVALUATE: 5, Beside.CHECKPOINT: 5,
}  # fmt: skip
NAMES: dict[Kind | Wait | Beside, str] = {
    Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update", Wait.ACTIVATION: "wait for activation",
    Wait.GRADIENT: "wait for gradient", Wait.AGREEMENT: "wait for agreement", Wait.DATA: "wait for data",
    Beside.SEND: "send", Beside.REDUCE: "reduce", Beside.DRAIN: "drain", Beside.EVALUATE: "validation",
    Beside.CHECKPOINT: "checkpoint",
}  # fmt: skip


def write_perfetto(run: RecordedRun, summary: Summary, path: Path) -> None:
    """Write a recorded run: a process per stage, arrows from each forward and backward to the neighbour's."""
    content = {"displayTimeUnit": "ms", "traceEvents": list(events(run))}
    path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")


def events(run: RecordedRun) -> Iterator[Event]:
    """All events of a run; times are in microseconds."""
    for rank in run.ranks:
        yield from _names(rank)
        yield from (_slice(rank, span) for span in rank.spans)
        yield from _bytes_sent(rank)
    for stages in run.replicas():
        yield from _arrows(stages)


def process_of(rank: RankTrace) -> int:
    """Number of the process that stands for a stage."""
    return rank.meta.replica * rank.meta.num_stages + rank.meta.stage + 1


def _names(rank: RankTrace) -> Iterator[Event]:
    process = process_of(rank)
    name = f"{rank.name} (rank {rank.meta.rank}, {rank.meta.host})"
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for thread, thread_name in _THREADS.items():
        about = {"ph": "M", "pid": process, "tid": thread}
        yield {**about, "name": "thread_name", "args": {"name": thread_name}}
        yield {**about, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _slice(rank: RankTrace, span: Span) -> Event:
    mini_batch = rank.mini_batch(span)
    details: dict[str, Any] = {"mini_batch": mini_batch}
    if span.kind in PER_MICRO_BATCH:
        details["micro_batch"] = span.index
    if span.version >= 0:
        details["weights"] = f"W{span.version}"
        if span.kind is not Kind.UPDATE:
            details["staleness"] = mini_batch - span.version
    if span.num_bytes:
        details["bytes"] = span.num_bytes
    return {
        "ph": "X", "name": f"{NAMES[span.kind]} {span.index}", "cat": span.kind.value, "pid": process_of(rank),
        "tid": _THREAD_OF[span.kind], "ts": _us(span.start), "dur": round(_us(span.end) - _us(span.start), 3),
        "args": details,
    }  # fmt: skip


def _bytes_sent(rank: RankTrace) -> Iterator[Event]:
    total = 0
    for span in rank.spans:
        if span.kind is Beside.SEND:
            total += span.num_bytes
            yield {
                "ph": "C", "name": "bytes sent", "pid": process_of(rank), "ts": _us(span.end), "args": {"bytes": total},
            }  # fmt: skip


def _arrows(stages: Sequence[RankTrace]) -> Iterator[Event]:
    works = [{(s.kind, s.index): s for s in stage.spans if isinstance(s.kind, Kind)} for stage in stages]
    number = stages[0].meta.replica << 40
    for kind, name, step in ((Kind.FORWARD, "activation", 1), (Kind.BACKWARD, "gradient", -1)):
        for place, stage in enumerate(stages):
            if not 0 <= place + step < len(stages) or stages[place + step].meta.stage != stage.meta.stage + step:
                continue
            for key, span in works[place].items():
                arrived = works[place + step].get(key)
                if key[0] is kind and arrived is not None:
                    number += 1
                    about = {"name": name, "cat": "message", "id": number, "tid": 1}
                    # Inside of the slice that it starts from: at its very end it would belong to the next one.
                    leaves = span.start + 0.999 * (span.end - span.start)
                    yield {**about, "ph": "s", "pid": process_of(stage), "ts": _us(leaves)}
                    yield {
                        **about, "ph": "f", "bp": "e", "pid": process_of(stages[place + step]),
                        "ts": _us(arrived.start),
                    }  # fmt: skip


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)

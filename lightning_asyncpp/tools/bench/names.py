"""The systems that benchmarks compare: their names on the command line and in files, and their titles in tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

ASYNC, ASYNC_FRESH, ASYNC_FABRIC = "async", "async+fresh", "async+fabric"
ASYNC_LEAST, ASYNC_LEAST_1, ASYNC_LEAST_2 = "async+least", "async+least1", "async+least2"
ASYNC_LEAST_EXACT = "async+least-exact"
ASYNC_TRACED, ASYNC_MONITORED = "async+trace", "async+monitor"
SYNC = "sync"
ONE_F_ONE_B, GPIPE = "1f1b", "gpipe"
INTERLEAVED, INTERLEAVED_ZERO_BUBBLE, ZBV = "interleaved", "interleaved-zb", "zbv"
FLOOR = "floor"

TITLES = {
    ASYNC: "async_pipeline, through the Trainer",
    ASYNC_FRESH: "async_pipeline, fresh last stage",
    ASYNC_LEAST: "async_pipeline, least staleness",
    ASYNC_LEAST_1: "async_pipeline, least staleness, slack 1",
    ASYNC_LEAST_2: "async_pipeline, least staleness, slack 2",
    ASYNC_LEAST_EXACT: "async_pipeline, least staleness, slack exact",
    ASYNC_TRACED: "async_pipeline, PipelineTrace on",
    ASYNC_MONITORED: "async_pipeline, PipelineMonitor on",
    ASYNC_FABRIC: "async_pipeline, in a Fabric loop",
    SYNC: "sync_pipeline, through the Trainer",
    ONE_F_ONE_B: "torch Schedule1F1B",
    GPIPE: "torch ScheduleGPipe",
    INTERLEAVED: "torch ScheduleInterleaved1F1B",
    INTERLEAVED_ZERO_BUBBLE: "torch ScheduleInterleavedZeroBubble",
    ZBV: "torch ScheduleZBVZeroBubble",
    FLOOR: "floor: no messages, no Trainer",
}
"""All systems, in the order in which they are shown."""
RIVALS = (ONE_F_ONE_B, GPIPE, INTERLEAVED, INTERLEAVED_ZERO_BUBBLE, ZBV)
"""torch's schedules."""
SPLIT_BACKWARD = (INTERLEAVED_ZERO_BUBBLE, ZBV)
"""Schedules that run the gradients of inputs and of weights apart."""
EXTRAS = {
    ASYNC_FRESH: "a fresh last stage",
    ASYNC_LEAST: "the least staleness",
    ASYNC_LEAST_1: "the least staleness with slack 1",
    ASYNC_LEAST_2: "the least staleness with slack 2",
    ASYNC_LEAST_EXACT: "the least staleness with slack exact",
    ASYNC_TRACED: "PipelineTrace",
    ASYNC_MONITORED: "PipelineMonitor",
}
"""What distinguishes a system from ``async``; they run where they are asked for."""
STALENESS: dict[str, dict[str, Any]] = {
    ASYNC_FRESH: {"staleness": "fresh_last_stage"},
    ASYNC_LEAST: {"staleness": "least"},
    ASYNC_LEAST_1: {"staleness": "least", "slack": 1},
    ASYNC_LEAST_2: {"staleness": "least", "slack": 2},
    ASYNC_LEAST_EXACT: {"staleness": "least", "slack": "exact"},
}
"""Arguments of the strategy of those that are not PipeDream-2BW: which micro-batches run on older weights."""
USUAL = [name for name in TITLES if name not in EXTRAS]
"""All other systems."""

OURS, GRAM, FLOAT32 = "ours", "gram", "float32"
TORCH, TORCH_FUSED, LIBRARY = "torch", "torch-fused", "pytorch_optimizer"
OPTIMIZERS = {
    OURS: "MuonAdamW",
    GRAM: "MuonAdamW, Gram form",
    FLOAT32: "MuonAdamW, float32",
    TORCH: "torch Muon + AdamW",
    TORCH_FUSED: "torch Muon + AdamW(fused=True)",
    LIBRARY: "pytorch_optimizer Muon",
}
"""What ``asyncpp bench optimizer`` compares."""


def problems_of_systems(names: Sequence[str], known: Iterable[str] = TITLES, argument: str = "--systems") -> list[str]:
    """What is wrong with a choice of systems, all of it.

    Args:
        names: that were chosen.
        known: that the benchmark has.
        argument: that chose them.
    """
    problems = []
    unknown = [name for name in names if name not in known]
    if unknown:
        problems.append(f"{argument} {' '.join(unknown)}: unknown; there are {', '.join(known)}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        problems.append(f"{argument} {' '.join(twice)}: named more than once")
    return problems

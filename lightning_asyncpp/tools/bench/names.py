"""The systems that benchmarks compare: their names on the command line and in files, and their titles in tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

ASYNC, ASYNC_2BW, ASYNC_FABRIC = "async", "async+2bw", "async+fabric"
ASYNC_SLACK_1, ASYNC_SLACK_2, ASYNC_EXACT = "async+slack1", "async+slack2", "async+exact"
ASYNC_TRACED, ASYNC_MONITORED = "async+trace", "async+monitor"
SYNC = "sync"
ONE_F_ONE_B, GPIPE = "1f1b", "gpipe"
INTERLEAVED, INTERLEAVED_ZERO_BUBBLE, ZBV = "interleaved", "interleaved-zb", "zbv"
FLOOR = "floor"

TITLES = {
    ASYNC: "async_pipeline, through the Trainer",
    ASYNC_2BW: "async_pipeline, PipeDream-2BW",
    ASYNC_SLACK_1: "async_pipeline, slack 1",
    ASYNC_SLACK_2: "async_pipeline, slack 2",
    ASYNC_EXACT: "async_pipeline, slack exact",
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
    ASYNC_2BW: "PipeDream-2BW",
    ASYNC_SLACK_1: "a slack of 1",
    ASYNC_SLACK_2: "a slack of 2",
    ASYNC_EXACT: "the slack exact",
    ASYNC_TRACED: "PipelineTrace",
    ASYNC_MONITORED: "PipelineMonitor",
}
"""What distinguishes a system from ``async``; they run where they are asked for."""
STALENESS: dict[str, dict[str, Any]] = {
    ASYNC_2BW: {"staleness": "uniform"},
    ASYNC_SLACK_1: {"slack": 1},
    ASYNC_SLACK_2: {"slack": 2},
    ASYNC_EXACT: {"slack": "exact"},
}
"""Arguments of the strategy of those that say which micro-batches run on older weights."""
USUAL = [name for name in TITLES if name not in EXTRAS]
"""All other systems."""

OURS, FLOAT32 = "ours", "float32"
TORCH, TORCH_FUSED, LIBRARY = "torch", "torch-fused", "pytorch_optimizer"
OPTIMIZERS = {
    OURS: "MuonAdamW",
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

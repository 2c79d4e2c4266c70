"""The third part, on GPUs alone: which streams share a hardware queue, and what a spinning kernel costs.

Kernels of NCCL spin until their message comes. One that shares a queue with others holds them up, and each of its
blocks keeps an SM from what is computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from lightning_asyncpp.private_names import required
from lightning_asyncpp.tools.doctor.task import Findings, Task

STREAMS = 8
"""The one that computes, and as many as the messages of a stage in the middle may take, with some to spare."""

_SLEEP_SECONDS = 0.02
_PRODUCTS_MS = 30.0
_MATRIX = 4096
_REPEATS = 3


def run(task: Task, findings: Findings) -> None:
    """Measure both on the first GPU, which there is."""
    torch.cuda.set_device(0)
    with findings.checking("hardware queues"):
        _judge_queues(held_up(_streams()), findings)
    with findings.checking("resident kernels"):
        if not task.machine.runs_triton:
            text = "Triton, in which the spinning kernel is written, cannot launch it here"
            findings.add("resident kernels", "skipped", text)
        else:
            _measure_spinning(task.quick, findings)


def _streams() -> list[Any]:
    return [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(STREAMS - 1))]


def held_up(streams: Sequence[Any]) -> list[list[bool]]:
    """[i][j]: whether work on stream j waits for what stream i still has to do; streams are independent by rights."""
    sleep = required(torch.cuda, "_sleep", "find out which streams share a hardware queue")
    for stream in streams:  # loads the kernel everywhere, and lets the clocks rise
        with torch.cuda.stream(stream):
            sleep(50_000_000)
    torch.cuda.synchronize()
    cycles = _cycles(sleep)
    waits = [[False] * len(streams) for _ in streams]
    for i, before in enumerate(streams):
        for j, behind in enumerate(streams):
            if i == j:
                continue
            # Twice: a host that was held up itself looks like a queue that was.
            waits[i][j] = all(_is_held_up(before, behind, sleep, cycles) for _ in range(2))
    return waits


def _is_held_up(before: Any, behind: Any, sleep: Any, cycles: int) -> bool:
    over = torch.cuda.Event()
    with torch.cuda.stream(before):
        sleep(cycles)
        over.record(before)
        sleep(1000)  # waits in the queue for the first one, as a second posted receive does
    with torch.cuda.stream(behind):
        sleep(1000)
    behind.synchronize()
    is_over = bool(over.query())
    torch.cuda.synchronize()
    return is_over


def _cycles(sleep: Any) -> int:
    """Cycles of the GPU that a kernel spins for :data:`_SLEEP_SECONDS`."""
    probe = 2_000_000
    started = time.perf_counter()
    sleep(probe)
    torch.cuda.synchronize()
    return int(probe * _SLEEP_SECONDS / max(1e-6, time.perf_counter() - started))


def _judge_queues(waits: Sequence[Sequence[bool]], findings: Findings) -> None:
    pairs = [f"{i}-{j}" for i, row in enumerate(waits) for j, is_held_up in enumerate(row) if is_held_up]
    table = "\n".join("".join(" X" if is_held_up else " ." for is_held_up in row) for row in waits)
    figures = {"held up (row: busy stream, column: waiting; 0 computes)": table, "pairs": len(pairs)}
    computing = [j for j, is_held_up in enumerate(waits[0]) if is_held_up] + [
        i for i, row in enumerate(waits) if row[0]
    ]
    if computing:
        text = f"what is computed shares a queue with {len(set(computing))} of {len(waits) - 1} other streams"
        fix = "CUDA_DEVICE_MAX_CONNECTIONS=32 gives more queues; nothing hangs, but messages and compute overlap less"
        findings.add("hardware queues", "warning", text, figures, fix)
    else:
        text = f"of {len(waits)} streams {len(pairs)} pairs hold each other up, none of them the one that computes"
        findings.add("hardware queues", "ok", text, figures)


def _measure_spinning(quick: bool, findings: Findings) -> None:
    """Products of matrices while kernels spin on some SMs."""
    from lightning_asyncpp.tools.doctor.spin import spin

    a = torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    spin(1, 1)  # compiles it, which takes the host a while
    products = _num_products(a)
    alone = _products_ms(a, products)
    turns = _turns(3 * _REPEATS * alone)
    figures: dict[str, Any] = {"alone_ms": round(alone, 3)}
    slower = {}
    most = torch.cuda.get_device_properties(0).multi_processor_count // 3
    for sms in (4, 16) if quick else (1, 2, 4, 8, 16, 32):
        if sms > most:
            break
        torch.cuda.synchronize()
        over = torch.cuda.Event()
        with torch.cuda.stream(side):
            spin(sms, turns)
            over.record()
        taken = _products_ms(a, products)
        if over.query():
            raise RuntimeError("the spinning kernel ended before what was to be measured beside it")
        figures[f"{sms}_sms_ms"] = round(taken, 3)
        slower[sms] = taken / alone - 1
    torch.cuda.synchronize()
    text = ", ".join(f"{sms} SMs {share:+.1%}" for sms, share in slower.items())
    findings.add(
        "resident kernels", "ok", f"products of matrices take longer beside kernels that spin on {text}", figures
    )


def _num_products(a: torch.Tensor) -> int:
    """How many take about :data:`_PRODUCTS_MS`."""
    return max(1, round(_PRODUCTS_MS / max(1e-3, _products_ms(a, 1))))


def _products_ms(a: torch.Tensor, products: int) -> float:
    """Milliseconds of the device for some products, the least of several times."""
    out = torch.empty_like(a)
    times = []
    for _ in range(_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(products):
            torch.mm(a, a, out=out)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(min(times))


def _turns(milliseconds: float) -> int:
    """How often the spinning kernel's loop must turn to last so long."""
    from lightning_asyncpp.tools.doctor.spin import spin

    probe = 20_000
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    spin(1, probe)
    end.record()
    end.synchronize()
    return min(2**30, int(probe * milliseconds / max(1e-3, start.elapsed_time(end))))

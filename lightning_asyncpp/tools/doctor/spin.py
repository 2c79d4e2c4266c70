"""A kernel that keeps SMs busy, as those of NCCL do while they wait, but ends by itself: nothing can hang."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 32768
"""Numbers per block, in registers of its 1024 threads: with 64 each they take all that an SM has, so that nothing else
fits beside it."""

WARPS = 32


@triton.jit(do_not_specialize=["turns"])  # type: ignore[untyped-decorator]
def _kernel(values, turns, block: tl.constexpr):  # type: ignore[no-untyped-def]
    places = values + tl.program_id(0) * block + tl.arange(0, block)
    numbers = tl.load(places)
    for _ in range(turns):
        numbers = numbers * 0.999 + 0.5
    tl.store(places, numbers)


def spin(blocks: int, turns: int) -> None:
    """Launch it on the current stream.

    Args:
        blocks: each on an SM.
        turns: of its loop.
    """
    values = torch.zeros(blocks * BLOCK, device="cuda")
    _kernel[(blocks,)](values, turns, BLOCK, num_warps=WARPS)

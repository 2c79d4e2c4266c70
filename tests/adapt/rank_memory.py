"""Prints the memory that each of two ranks has for itself when it reads a model, cuts it, and changes its weights.

python -m tests.adapt.rank_memory
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from lightning_asyncpp import pipelined
from lightning_asyncpp.core.cut.cutting import cut

RANKS = 2
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 8}
DTYPES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))


def own_memory() -> float:
    """MiB that this process shares with no other one, and that no file holds."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free counts as free
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def save(folder: str, dtype: str, **sizes: int) -> float:
    """Save a Llama with random weights; their MiB."""
    config = transformers.LlamaConfig(vocab_size=16000, **{**SIZES, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    return float(sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20)


def of_a_rank(folder: str, dtype: str, rank: int, results: Any = None) -> dict[str, float]:
    """MiB of its own that a rank has got by each step."""
    torch.set_num_threads(1)
    before, found = own_memory(), {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    found["read"] = own_memory() - before
    pipelined(model)
    found["pipelined"] = own_memory() - before
    cut(model, rank, RANKS, seed=0, device=torch.device("cpu"))
    found["cut"] = own_memory() - before
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    found["its weights changed"] = own_memory() - before
    if results is not None:
        results.put(found)
    return found


def main() -> None:
    """Print all combinations of dtypes."""
    context = multiprocessing.get_context("spawn")
    for saved, dtype in DTYPES:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{save(folder, saved):.0f} MiB of weights, saved in {saved} and read in {dtype}; MiB of each rank:")
            results = context.Queue()
            ranks = [context.Process(target=of_a_rank, args=(folder, dtype, r, results)) for r in range(RANKS)]
            for rank in ranks:
                rank.start()
            found = [results.get(timeout=300) for _ in ranks]
            for rank in ranks:
                rank.join()
        for step in found[0]:
            print(f"  {step:20}", *(f"{of_one[step]:6.0f}" for of_one in found))


if __name__ == "__main__":
    main()

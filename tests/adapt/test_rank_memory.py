"""Ranks that cut the same saved model share its weights: none has a copy of its own until it changes them.

`python -m tests.adapt.test_rank_memory` prints the memory that a rank has for itself by each step, of larger models.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

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
    import transformers

    config = transformers.LlamaConfig(vocab_size=16000, **{**SIZES, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    return float(sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20)


def of_a_rank(folder: str, dtype: str, rank: int) -> dict[str, float]:
    """MiB of its own that a rank has got by each step."""
    import transformers

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
    return found


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_rank_has_no_copy_of_the_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    weights = save(str(tmp_path), "bfloat16", hidden_size=512, num_hidden_layers=8)  # too many to compare gradients
    found = of_a_rank(str(tmp_path), "bfloat16", rank=0)
    assert found["cut"] < 0.4 * weights, found


if __name__ == "__main__":
    if len(sys.argv) > 1:  # a rank, in a process of its own
        print({name: round(size) for name, size in of_a_rank(*sys.argv[1:3], rank=int(sys.argv[3])).items()})
    else:
        for saved, dtype in DTYPES:
            with tempfile.TemporaryDirectory() as folder:
                print(f"{save(folder, saved):.0f} MiB of weights, saved in {saved} and read in {dtype}; of each rank:")
                command = [sys.executable, "-m", "tests.adapt.test_rank_memory", folder, dtype]
                ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(RANKS)]
                for rank in ranks:
                    rank.wait()

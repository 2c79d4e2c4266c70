"""Ranks that cut the same saved model share the memory of its weights until they change them."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import pytest
import torch

from lightning_asyncpp import pipelined
from lightning_asyncpp.core.cut.cutting import cut


def own_memory() -> float:
    """Return the size, in MiB, of this process's memory that neither another process nor a file shares."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # return freed memory to the system
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_rank_has_no_copy_of_the_weights(tmp_path: Path) -> None:
    """A rank copies no weights, even of a model that is too large to compute the gradients of all of them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16000, hidden_size=512, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    weights = sum(p.nbytes for p in model.parameters()) / 2**20
    del model
    before = own_memory()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    pipelined(model)
    cut(model, 0, 2, seed=0, device=torch.device("cpu"))
    found = own_memory() - before
    print(f"{weights:.0f} MiB of weights, {found:.0f} of this rank's own")
    assert found < 0.4 * weights

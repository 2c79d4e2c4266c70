"""Prints what `pipelined` adds to a forward: processor time of the code around the blocks that stages run again.

python -m tests.adapt.replay_cost [family] [layers]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_asyncpp import pipelined
from lightning_asyncpp.core.cut.units import pipeline_units
from tests.adapt.models import TRANSFORMERS, batches_for, of_transformers

ROUNDS = 200


def costs(name: str, layers: int) -> dict[str, list[float]]:
    """Milliseconds of processor time by part, in every round; the model is so small that it costs next to nothing."""
    key = next(key for key in ("num_hidden_layers", "n_layer", "num_layers") if key in TRANSFORMERS[name][1])
    model = pipelined(of_transformers(name, **{key: layers})).train()
    batch = {**batches_for(name, model)[0], "use_cache": False}
    units = pipeline_units(model)
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        spent = Counter({"forward by itself": _timed(lambda: model(**batch))[0]})
        args, kwargs = (), batch
        for unit in units:
            part = "all blocks" if unit.members is None else f"code around: {unit.name}"
            milliseconds, output = _timed(unit.apply, args, kwargs)
            spent[part] += milliseconds
            args, kwargs = (output,), {}
        for part, milliseconds in spent.items():
            found.setdefault(part, []).append(milliseconds)
    return found


def _timed(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    before = time.process_time_ns()
    output = function(*args)
    return (time.process_time_ns() - before) / 1e6, output


def lines(found: dict[str, list[float]]) -> Iterator[str]:
    """Median and quartiles of each part."""
    for part, values in found.items():
        low, median, high = statistics.quantiles(values, n=4)
        yield f"{part:40} {median:6.2f} ms ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    family, depth = [*sys.argv[1:], *("llama", "6")[len(sys.argv) - 1 :]][:2]
    print(f"{family} with {depth} layers, one micro-batch, torch {torch.__version__}, median of {ROUNDS} (quartiles):")
    print(*lines(costs(family, int(depth))), sep="\n")

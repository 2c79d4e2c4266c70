"""Measurement of a training's memory: the resident memory of each rank, which is a process of its own.

``python -m tests.tools.plan.measured RECIPE OUTPUT`` is one rank, in an environment like torchrun's. It first trains a
model of few layers, so that libraries are loaded and have allocated what they keep (kernels of each shape), and then
the recipe. The result is the peak resident size of the second training minus the size before it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

# Tensors of 32 KiB or more are mapped one by one, and returned to the system when they are freed.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "32768",
          "MALLOC_TOP_PAD_": "0", "MALLOC_MMAP_MAX_": "1000000"}  # fmt: skip


def measure(recipe: dict[str, Any], world_size: int, timeout: int = 500) -> list[int]:
    """Train a recipe in ``world_size`` processes; return each stage's bytes in the first replica, first stage first."""
    from tests.helpers.pool import elastic_environment, free_port

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        port = free_port()
        processes = []
        for rank in range(world_size):
            environment = {**os.environ, **elastic_environment(rank, world_size, port), **MALLOC}
            environment |= {"OMP_NUM_THREADS": "1", "MKL_DISABLE_FAST_MM": "1"}
            environment["PYTHONPATH"] = os.pathsep.join(sys.path)
            command = ["timeout", "-k", "5", str(timeout), sys.executable, "-m", "tests.tools.plan.measured"]
            command += [str(path), str(Path(folder) / f"{rank}.json")]
            with (Path(folder) / f"{rank}.out").open("w") as output:
                processes.append(subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=output))
        ended = [process.wait() for process in processes]
        printed = [(Path(folder) / f"{rank}.out").read_text()[-3000:] for rank in range(world_size)]
        assert not any(ended), "\n".join(printed)
        peaks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world_size)]
    stages = world_size // recipe["trainer"]["strategy"]["init_args"].get("data_parallel_size", 1)
    return list(reversed(peaks[:stages]))  # rank 0 is the last stage


def main() -> None:
    recipe, output = sys.argv[1:]
    train(smaller(Path(recipe)))
    before = settled()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak size
    train(Path(recipe))
    Path(output).write_text(json.dumps(status("VmHWM") - before))


def settled() -> int:
    """Return the resident size after the memory of ended threads is freed, which takes a while on a busy machine."""
    sizes = [0]
    for _ in range(40):
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        sizes.append(status("VmRSS"))
        if len(sizes) > 4 and max(sizes[-4:]) - min(sizes[-4:]) < 2**18:
            break
        time.sleep(0.25)
    return sizes[-1]


def smaller(path: Path) -> Path:
    """Write a recipe with the same layers, but only two per device, and two updates; return its path."""
    recipe = yaml.safe_load(path.read_text())
    recipe["model"]["init_args"]["config"]["num_layers"] = 2 * recipe["trainer"]["devices"]
    recipe["trainer"]["max_steps"] = 2
    small = Path(f"{path}.{os.environ['RANK']}")
    small.write_text(yaml.safe_dump(recipe))
    return small


def train(path: Path) -> None:
    from lightning_asyncpp.cli import main as asyncpp

    with contextlib.redirect_stdout(io.StringIO()):
        asyncpp(["fit", "--config", str(path)])


def status(name: str) -> int:
    """Return a size of this process from ``/proc/self/status``, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()

"""Threads that call torch end before the interpreter does; otherwise they would abort the process."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_asyncpp.core import background
from tests.helpers.programs import run

SCRIPT = """
import ctypes
import gc
import time
from datetime import timedelta

import torch.distributed as dist

from lightning_asyncpp.core import background

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def wait(done):
    try:
        store.wait(["never"], timedelta(seconds=0.5))
    except Exception:
        print(done, flush=True)


background.run(lambda: wait("waited"), "test")
background.run_later(60, lambda: wait("later"))
background.run_later(0, lambda: wait("at once"))
time.sleep(0.2)
gc.freeze()  # what the fork server imported is not the question
ctypes.pythonapi.Py_Exit(0)  # as an interpreter ends, where the others of the fork server leave at once
"""


def test_threads_are_through_before_the_interpreter_ends(tmp_path: Path) -> None:
    end = run(["-c", SCRIPT], tmp_path)
    assert end.returncode == 0, end.stderr
    assert sorted(end.stdout.splitlines()) == ["at once", "later", "waited"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed by Linux")
def test_torch_calls_its_workers_so(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        deadline = time.monotonic() + 30  # a worker sets its name when it begins to run
        while background.GLOO_WORKER not in (names := _names_of_threads()) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        dist.destroy_process_group()
    assert background.GLOO_WORKER in names


def _names_of_threads() -> list[str]:
    names = []
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended
            names.append((thread / "comm").read_text().strip())
    return names

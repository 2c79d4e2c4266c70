"""No thread is inside torch when the interpreter ends: it would abort the process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_asyncpp.core import background
from tests.helpers.alone import run_script

SCRIPT = """
    import sys, threading, time
    from datetime import timedelta

    import torch.distributed as dist

    from lightning_asyncpp.core import background

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


    def wait(done):
        try:
            store.wait(["never"], timedelta(seconds=1))
        except Exception:
            print(done, flush=True)


    class Slow:
        def __init__(self):
            self.sleep = time.sleep

        def __del__(self):  # the interpreter takes its time to end
            self.sleep(2)


    if sys.argv[1] == "bare":
        threading.Thread(target=wait, args=["bare"], daemon=True).start()
    else:
        background.run(lambda: wait("waited"), "test")
        background.run_later(60, lambda: wait("later"))
        background.run_later(0, lambda: wait("at once"))
    time.slow = Slow()
    time.sleep(0.2)
"""


def test_threads_are_through_before_the_interpreter_ends() -> None:
    end = run_script(SCRIPT, "here")
    assert end.returncode == 0, end.stderr
    assert sorted(end.stdout.splitlines()) == ["at once", "later", "waited"]


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="such threads hang there, and end with the process")
def test_what_would_happen_otherwise() -> None:
    end = run_script(SCRIPT, "bare")
    assert end.returncode == -6
    assert "terminate called without an active exception" in end.stderr


on_linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed by Linux")


@on_linux
@pytest.mark.parametrize(("seconds", "waited"), [(0.0, 0.0), (0.2, 0.2), (3.0, 1.0)])
def test_a_worker_that_runs_is_waited_for_a_second_at_most(seconds: float, waited: float) -> None:
    begun, end = threading.Event(), time.monotonic() + seconds

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(background.GLOO_WORKER)
        begun.set()
        while time.monotonic() < end:
            sum(range(100_000))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    begun.wait()
    begin = time.monotonic()
    background.wait_for_workers()
    took = time.monotonic() - begin
    end = 0.0
    thread.join()
    assert waited - 0.1 <= took < waited + 0.9


@on_linux
def test_torch_calls_its_workers_so(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        deadline = time.monotonic() + 30  # a worker calls itself so, once it runs
        while background.GLOO_WORKER not in (names := _names_of_threads()) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        dist.destroy_process_group()
    assert background.GLOO_WORKER in names


def _names_of_threads() -> list[str]:
    names = []
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended
            names.append((thread / "comm").read_text().strip())
    return names


COLLECTIVES = """
    import sys
    import torch
    import torch.distributed as dist
    if sys.argv[3] == "waits":
        import lightning_asyncpp.core.background
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
    for _ in range(20):
        dist.all_reduce(torch.ones(3))
"""


@on_linux
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="such threads hang there, and end with the process")
def test_scripts_that_end_with_a_collective_end_well_on_a_busy_machine(tmp_path: Path) -> None:
    spin = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        assert any(_aborted(tmp_path / f"bare{k}", "bare") for k in range(40)), "no longer needed"
        assert not any(_aborted(tmp_path / f"waits{k}", "waits") for k in range(12))
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _aborted(store: Path, how: str) -> bool:
    """Whether one of two ranks was."""
    command = [sys.executable, "-c", textwrap.dedent(COLLECTIVES), str(store)]
    ranks = [subprocess.Popen([*command, str(rank), how], stderr=subprocess.DEVNULL) for rank in (0, 1)]
    return -6 in [rank.wait(120) for rank in ranks]

"""No thread is inside torch when the interpreter ends: it would abort the process."""

from __future__ import annotations

import sys

import pytest

from tests.pipeline.alone import run_script

SCRIPT = """
    import sys, threading, time
    from datetime import timedelta

    import torch.distributed as dist

    from lightning_asyncpp.pipeline import background

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

"""When a rank is taken for one that makes no progress, and what is said of it."""

from __future__ import annotations

import bdb
import json
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lightning_asyncpp.core.failures import progress_watch
from lightning_asyncpp.core.failures.cause import Cause
from lightning_asyncpp.core.failures.progress_watch import ProgressWatch
from lightning_asyncpp.core.failures.standstill import Standstill, Standstills, account_of, stack_of, told
from lightning_asyncpp.core.progress import PROGRESS
from lightning_asyncpp.errors import ProtocolError
from tests import forked

LIMIT = 0.5
LONG = 3 * LIMIT


@contextmanager
def watched(limit: float = LIMIT) -> Iterator[tuple[ProgressWatch, list[Standstill]]]:
    found: list[Standstill] = []
    watch = ProgressWatch(limit, found.append)
    watch.begin()
    try:
        yield watch, found
    finally:
        watch.end()


def test_time_without_progress_is_told_once() -> None:
    with watched() as (watch, found):
        watch.enter("here")
        time.sleep(LONG)
        ((seconds, place, waits),) = found
        assert (seconds, waits) == (LIMIT, False)
        assert place.startswith(f"in {test_time_without_progress_is_told_once.__name__} ({__file__}, line ")
        PROGRESS.made += 1
        time.sleep(LONG)
        assert len(found) == 2, "and again, if it went on meanwhile"


def test_nothing_is_told_where_there_is_progress() -> None:
    with watched() as (watch, found), watch.within("here"):
        for _ in range(10):
            time.sleep(LONG / 10)
            PROGRESS.made += 1
        assert found == []


def test_nothing_is_told_where_none_is_due() -> None:
    """Nowhere, no longer, and with a watch that has ended; nor where progress is due anew now and then."""
    with ExitStack() as stack:
        watches, found = zip(*(stack.enter_context(watched()) for _ in range(4)))
        _, left, ended, again = watches
        for watch in (left, ended, again):
            watch.enter("here")
        left.leave("here")
        ended.end()
        for _ in range(10):
            time.sleep(LONG / 10)
            with again.within("a call"):
                pass
        assert found == ([], [], [], [])


def computes(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def test_who_computes_has_ten_times_as_long() -> None:
    """A hook that evaluates something at length; but not for ever, for it may wait for a device in a loop."""
    limit = LIMIT / 2
    with watched(limit) as (watch, found), watch.within("here"):
        computes(3 * limit)
        assert found == []
        computes(10 * limit)
        assert len(found) == 1


def test_who_looks_now_and_then_whether_something_has_come_does_not_compute() -> None:
    """As torch's loader does while its workers hang."""
    with watched() as (watch, found), watch.within("here"):
        for _ in range(30):
            time.sleep(LONG / 30)
        assert len(found) == 1


def test_a_debugger_at_its_prompt_holds_nobody_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def prompt() -> None:
        time.sleep(LONG)

    monkeypatch.setitem(prompt.__globals__, "__name__", bdb.__name__)
    with watched() as (watch, found), watch.within("here"):
        prompt()
        assert found == []


def test_a_wait_for_another_rank_is_told_as_one_and_later_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_watch, "_LATE_SECONDS", 4 * LIMIT)
    monkeypatch.setitem(globals(), "__name__", "lightning_asyncpp.core.wire.link")
    with watched() as (watch, found), watch.within("here"):
        time.sleep(LONG)
        assert [account.waits for account in found] == [True]
        time.sleep(4 * LIMIT)
        assert [account.waits for account in found] == [True, False]


def test_writing_a_checkpoint_is_progress_as_long_as_bytes_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written = [0]

    def count(_: int) -> int:
        written[0] += 2**19
        return written[0]

    monkeypatch.setattr(progress_watch, "_written", count)
    with watched() as (watch, found), watch.within("a save"):
        time.sleep(LONG)
        assert found == []
        monkeypatch.setattr(progress_watch, "_written", lambda _: written[0])
        time.sleep(LONG)
        assert len(found) == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nobody counts what is written")
def test_what_is_written_counts_only_in_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = threading.get_ident()
    assert progress_watch._written(thread) == 0
    monkeypatch.setitem(globals(), "__name__", "lightning_asyncpp.storage.whole")
    assert progress_watch._written(thread) > 0


STOPPED = """
    import os, signal, subprocess, sys, time
    from lightning_asyncpp.core.failures.progress_watch import ProgressWatch

    found = []
    watch = ProgressWatch(2.0, found.append)
    watch.begin()
    watch.enter("here")
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -STOP {os.getpid()}; sleep 4; kill -CONT {os.getpid()}"])
    end = time.monotonic() + 4.5
    while time.monotonic() < end:  # no longer than half a second after it went on
        time.sleep(0.05)
    assert found == [], found
    time.sleep(3.0)
    assert len(found) == 1, found
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs SIGSTOP")
def test_time_in_which_a_process_was_stopped_does_not_count(tmp_path: Path) -> None:
    done = forked.run(["-c", textwrap.dedent(STOPPED)], tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_place_is_the_users_line_and_the_loader_is_named() -> None:
    stopped = threading.Event()

    def reads() -> None:
        stopped.wait()

    def loads(name: str, inner: Callable[[], None]) -> Callable[[], None]:
        code = compile("def call(inner):\n    inner()\n", "/x/site-packages/lightning/loops.py", "exec")
        scope: dict = {"__name__": name}
        exec(code, scope)
        return lambda: scope["call"](inner)

    loops = "lightning.pytorch.loops"
    call = loads(f"{loops}.fit_loop", loads(f"{loops}.evaluation_loop", loads(f"{loops}.fetchers", reads)))
    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.2)
    assert thread.ident is not None
    account = account_of(thread.ident, 5.0)
    assert account is not None
    assert account.place.startswith(f"waiting in an evaluation's loader ({__file__}, line ")
    assert "stopped.wait()" in stack_of(thread.ident)
    stopped.set()
    thread.join()
    assert account_of(thread.ident, 5.0) is None


HERE, WAITS = Standstill(5.0, "in f (a.py, line 1)", False), Standstill(5.0, "in g (b.py, line 2)", True)
STAGES = [2, 1, 0]


def test_what_is_told_names_who_waits_for_nobody() -> None:
    all_of_them = told({0: HERE, 1: WAITS, 2: HERE}, STAGES)
    assert all_of_them.line == all_of_them.text
    assert all_of_them.line == (
        "no rank has made progress for 5 s: rank 0 (stage 2), rank 2 (stage 0), in f (a.py, line 1)"
    )
    assert told({1: HERE}, STAGES).line == "no progress for 5 s: rank 1 (stage 1), in f (a.py, line 1)"
    assert not told({1: HERE}, STAGES).is_error
    assert Cause.unpack(all_of_them.pack()) == all_of_them


@pytest.mark.parametrize("ranks", [{}, {0: WAITS, 1: WAITS, 2: WAITS}])
def test_waits_alone_end_nothing(ranks: dict[int, Standstill]) -> None:
    decided: list[Cause] = []
    known = Standstills(STAGES, decided.append)
    for rank, account in ranks.items():
        known.add(rank, account)
    time.sleep(0.1)
    assert decided == []


def test_it_is_decided_when_all_are_known_or_soon_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[Cause] = []
    known = Standstills(STAGES, decided.append)
    for rank, account in {0: WAITS, 2: HERE, 1: WAITS}.items():
        assert decided == []
        known.add(rank, account)
    assert [cause.rank for cause in decided] == [2]
    Standstills(STAGES, decided.append).add(1, HERE)
    end = time.monotonic() + 20
    while len(decided) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert [cause.rank for cause in decided] == [2, 1]


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"[1, 2, 3]", b'["1", "x", true]', b"[" * 10_000, json.dumps([1, "x", 1]).encode(), b"\xff"]
)
def test_what_is_no_account_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="no account of a standstill"):
        Standstill.unpack(data)
    assert Standstill.unpack(HERE.pack()) == HERE

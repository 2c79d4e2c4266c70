"""A rank reports its failures to the others and raises theirs; tested without other ranks, and in processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp.core import failure_watch, first_cause
from lightning_asyncpp.core.failure_watch import FailureWatch
from lightning_asyncpp.core.first_cause import Cause
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.errors import ConfigurationError, PeerLostError, peer_lost
from tests.core.failures import watched
from tests.helpers.failing import Outcome, run_ranks
from tests.helpers.programs import run

RANKS = 3  # rank 2 is the first stage, rank 0 the last
CAUSE = Cause("rank 1 (stage 0) failed first: ValueError: the user's own mistake", "Traceback ...")
RAW = RuntimeError("[/gloo/pair.cc:5] Connection closed by peer [127.0.0.1]:1")


class Known:
    """Fake ``FirstCause`` of a rank without other ranks."""

    def __init__(self, cause: Cause | None) -> None:
        self.cause = cause
        self.reported: list[Cause] = []

    def wait(self, seconds: float) -> Cause | None:
        return self.cause

    def report(self, cause: Cause, seconds: float) -> Cause:
        self.reported.append(cause)
        self.cause = self.cause or cause
        return self.cause

    def stop(self) -> None: ...


def watching(cause: Cause | None = None) -> tuple[FailureWatch, Known]:
    """Return the watch of rank 0 of two, which are not connected, and its fake first cause."""
    watch, known = FailureWatch(), Known(cause)
    watch._mesh, watch._first = Mesh(2, 1, 0), known  # type: ignore[assignment]
    return watch, known


@pytest.fixture(autouse=True)
def _no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the exit handlers of watches, since this process runs the tests."""
    monkeypatch.setattr(failure_watch, "AtExit", lambda action: None)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PeerLostError("a neighbour is gone"), CAUSE.text),
        (RuntimeError(*RAW.args), CAUSE.text),
        (ConfigurationError("lower it"), "lower it"),
    ],
    ids=["lost", "lost, untranslated", "own"],
)
def test_an_error_that_another_rank_caused_says_so(error: Exception, says: str) -> None:
    watching(CAUSE)[0].fail(error)
    assert str(error) == says


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (peer_lost("rank 1 (stage 0)", RAW), ["rank 1 (stage 0) is gone"]),
        (ValueError("mine"), ["rank 0 (stage 1) failed first"]),
        (SystemExit("no such file"), ["rank 0 (stage 1) failed first"]),
        (SystemExit(0), []),
    ],
    ids=["lost", "error", "exit", "end"],
)
def test_the_others_are_told_of_what_ends_a_rank(error: BaseException, told: list[str]) -> None:
    watch, known = watching()
    watch.fail(error)
    assert [cause.line.partition(":")[0] for cause in known.reported] == told


def test_a_teardown_has_to_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    monkeypatch.setattr(FailureWatch, "_kill_process", lambda self: left.append("left"))
    monkeypatch.setattr(failure_watch, "LEAVE_SECONDS", 0.2)
    watch, _ = watching()
    for hurries, expected in ((False, []), (True, ["left"])):
        watch.set_deadline()
        if not hurries:
            watch.cancel_deadline()  # the script has received its error, and may take any time
        time.sleep(0.4)
        assert left == expected


def test_children_outlive_no_rank_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's observer reads this list, but does not kill this rank if a child fails that is no longer in it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    children = [child]
    monkeypatch.setattr(failure_watch, "LEAVE_SECONDS", 0.3)
    monkeypatch.setattr(failure_watch, "CAUSE_SECONDS", 0.0)
    monkeypatch.setattr(failure_watch, "uncaught", lambda: None)
    watch, _ = watching()
    watch.children = children
    watch.fail(ValueError("mine"))
    assert children == []
    assert watch._wait_for_children is not None
    watch._wait_for_children()
    assert child.poll() is None, "the script has caught what failed"
    monkeypatch.setattr(failure_watch, "uncaught", lambda: ValueError("mine"))
    watch._wait_for_children()
    assert child.poll() is not None


def test_a_session_raises_what_another_rank_did_once() -> None:
    session = PipelineSession(PipelineSettings())
    session.watch._on_remote_failure(Cause("rank 1 (stage 0) is gone: it was stopped"))
    deadline = time.monotonic() + 4.0
    while session.watch.failure is None and time.monotonic() < deadline:
        time.sleep(0.02)
    with pytest.raises(PeerLostError, match=r"^rank 1 .* is gone: it was stopped$") as caught:
        session.running()
    session.watch.fail(caught.value)
    with pytest.raises(RuntimeError, match="the pipeline has failed and cannot go on: PeerLost"):
        session.running()


def test_the_error_that_ends_a_process_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def ending(code: object) -> BaseException | None:
        try:
            try:
                raise ValueError("the user's own mistake")
            except ValueError:
                sys.exit(code)  # type: ignore[arg-type]
        except SystemExit:
            return first_cause.uncaught()

    assert first_cause.uncaught() is ending(0) is None
    assert repr(ending(1)) == 'ValueError("the user\'s own mistake")', "a worker of multiprocessing ends so"
    error = ValueError("nobody caught it")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert first_cause.uncaught() is error


HANGS = """
import threading, time
from lightning_asyncpp.core import failure_watch
from tests.core.failures.test_watch import CAUSE, watching

failure_watch.LEAVE_SECONDS = 0.5
watch, _ = watching(CAUSE)
threading.Thread(target=watch._on_remote_failure, args=[CAUSE]).start()

def waits_for_what_never_comes():
    time.sleep(1000)

waits_for_what_never_comes()
"""


def test_a_rank_that_does_not_end_by_itself_is_ended_with_the_cause(tmp_path: Path) -> None:
    done = run(["-c", HANGS], tmp_path)
    assert done.returncode == 1
    assert "in waits_for_what_never_comes" in done.stderr
    assert done.stderr.endswith(f"{CAUSE.line}\n")


# -- real processes -----------------------------------------------------------------------------------------------


def values(outcomes: list[Outcome]) -> list[Any]:
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes), [outcome.text for outcome in outcomes]
    return [outcome.value for outcome in outcomes]


def test_a_killed_rank_ends_all_that_wait() -> None:
    """If rank 0, which serves torch's store, is killed, the waits of all other ranks end."""
    outcomes = run_ranks(watched.killed, RANKS, 0)
    assert outcomes.pop(0).error == "killed"
    for outcome in outcomes:
        assert outcome.error == "PeerLostError"
        assert " is gone: " in outcome.text
        assert outcome.seconds < watched.SOON


@pytest.mark.parametrize(("rank", "waits"), [(0, True), (1, False)], ids=["waiting", "computing"])
def test_an_error_of_one_rank_is_what_the_others_raise(rank: int, waits: bool) -> None:
    texts = values(run_ranks(watched.error_of_one, RANKS, rank, waits))
    line = f"rank {rank} (stage {RANKS - 1 - rank}) failed first: ValueError: the user's own mistake"
    assert texts.pop(rank) == "the user's own mistake"
    assert [text.partition("\n")[0] for text in texts] == [line] * 2
    assert "\n" not in texts[-1]
    if rank != 0:
        assert texts[0].endswith("    ValueError: the user's own mistake"), "users look at rank 0"


def test_rank_0_may_end_well_before_the_others() -> None:
    outcomes = run_ranks(watched.ends_early, RANKS)
    assert {outcome.error for outcome in outcomes} == {"killed"}, "none raised anything"

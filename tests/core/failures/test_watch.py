"""What a rank does about a failure: alone, and in real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_asyncpp.core import failure_watch, first_cause
from lightning_asyncpp.core.failure_watch import FailureWatch
from lightning_asyncpp.core.first_cause import Cause
from lightning_asyncpp.core.ranks.agreement import OtherStageFailedError
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.errors import ConfigurationError, PeerLostError, is_noise, peer_lost
from tests.core.failures import watched
from tests.helpers.alone import run_script
from tests.helpers.failing import Outcome, run_ranks

RANKS = 3  # rank 2 is the first stage, rank 0 the last
CAUSE = Cause("rank 1 (stage 0) failed first: ValueError: the user's own mistake", "Traceback ...")
RAW = RuntimeError("[/gloo/pair.cc:5] Connection closed by peer [127.0.0.1]:1")


class Known:
    """What a rank knows of the first cause, where there are no others."""

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
    """A rank 0 of two, whose process is not to end."""
    watch, known = FailureWatch(), Known(cause)
    watch._mesh, watch._first = Mesh(2, 1, 0), known  # type: ignore[assignment]
    return watch, known


@pytest.fixture(autouse=True)
def _no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is that of the tests."""
    monkeypatch.setattr(failure_watch, "AtExit", lambda action: None)


@pytest.mark.parametrize("error", [PeerLostError("a neighbour is gone"), RAW], ids=["translated", "raw"])
def test_an_error_that_another_rank_caused_says_so(error: Exception) -> None:
    watch, _ = watching(CAUSE)
    error = type(error)(*error.args)
    watch.fail(error)
    assert str(error) == CAUSE.text


@pytest.mark.parametrize(
    "error", [ConfigurationError("lower it"), KeyError("own"), OtherStageFailedError("rank 1 (stage 0): it says why")]
)
def test_an_error_that_says_why_stays_as_it_is(error: Exception) -> None:
    before = str(error)
    watching(CAUSE)[0].fail(error)
    assert str(error) == before


def test_a_rank_that_lost_its_neighbour_and_is_told_nothing_tells_the_others() -> None:
    watch, known = watching()
    watch.fail(peer_lost("rank 1 (stage 0)", RAW))
    assert [cause.line.partition(":")[0] for cause in known.reported] == ["rank 1 (stage 0) is gone"]
    assert not known.reported[0].trace


@pytest.mark.parametrize("error", [SystemExit(2), SystemExit("no such file"), ValueError("mine")], ids=repr)
def test_who_ends_with_an_error_has_failed(error: BaseException) -> None:
    watch, known = watching()
    watch.fail(error)
    assert len(known.reported) == 1


@pytest.mark.parametrize("code", [0, None])
def test_who_ends_well_in_a_run_has_not(code: int | None) -> None:
    watch, known = watching()
    watch.fail(SystemExit(code))
    assert not known.reported


@pytest.mark.parametrize("in_time", [True, False])
def test_a_teardown_has_to_end_in_time(monkeypatch: pytest.MonkeyPatch, in_time: bool) -> None:
    left: list[str] = []
    monkeypatch.setattr(FailureWatch, "_leave_now", lambda self: left.append("left"))
    monkeypatch.setattr(failure_watch, "LEAVE_SECONDS", 0.3)
    watch, _ = watching()
    watch.fail(ValueError("mine"))
    time.sleep(0.6)
    assert not left, "the script has its error, and may take its time"
    watch.set_deadline()
    if in_time:
        watch.cancel_deadline()
    time.sleep(1.0)
    assert left == ["left"] * (not in_time)


def test_a_script_that_has_its_error_is_not_ended_when_more_is_learnt() -> None:
    """The watch's thread may be later than the script's."""
    watch, _ = watching(CAUSE)
    watch.fail(ArithmeticError("own"))
    watch._learn(CAUSE)
    assert watch._deadline is None
    assert isinstance(watch.failure, ArithmeticError)


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen]]:
    processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])]
    yield list(processes)
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("fails", [True, False])
def test_children_outlive_no_rank_that_fails(
    fails: bool, children: list[subprocess.Popen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's observer reads the same list: what is in it no longer, it does not kill this rank for."""
    (child,) = children
    monkeypatch.setattr(failure_watch, "LEAVE_SECONDS", 0.3)
    monkeypatch.setattr(failure_watch, "uncaught", lambda: ValueError("mine") if fails else None)
    watch, _ = watching()
    watch.children = children
    watch.fail(ValueError("mine"))
    assert children == []
    assert child.poll() is None, "it has time to say something, too"
    assert watch._outlast is not None
    watch._outlast()
    assert (child.poll() is not None) == fails


def test_a_failure_that_the_script_does_not_know_is_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(failure_watch.os, "_exit", codes.append)
    watch, _ = watching(CAUSE)
    watch._end_process()
    assert codes == [1]
    assert capfd.readouterr().err == f"asyncpp: {CAUSE.line}\n"
    watch.fail(PeerLostError("a neighbour is gone"))
    watch._end_process()
    assert codes == [1]


def test_nobody_watches_where_there_is_nobody_else() -> None:
    watch = FailureWatch()
    watch.start(Mesh(1, 1, 0))
    assert watch._first is None


def test_a_session_raises_what_another_rank_did_once() -> None:
    session = PipelineSession(PipelineSettings())
    session.watch._learn(Cause("rank 1 (stage 0) is gone: it was stopped"))
    for _ in range(200):
        if session.watch.failure is not None:
            break
        time.sleep(0.02)
    with pytest.raises(PeerLostError, match=r"^rank 1 .* is gone: it was stopped$") as caught:
        session.running()
    session.watch.fail(caught.value)
    with pytest.raises(RuntimeError, match="the pipeline failed and its ranks no longer answer each other: PeerLost"):
        session.running()


@pytest.mark.parametrize(
    ("text", "noise"),
    [
        ("[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error [::1]:9: Connection reset", True),
        ("Application timeout caused pair closure", True),
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv", True),
        ("mat1 and mat2 shapes cannot be multiplied (4x2 and 3x3)", False),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: the launch timed out and was terminated", False),
    ],
)
def test_what_a_broken_connection_sounds_like(text: str, noise: bool) -> None:
    assert is_noise(RuntimeError(text)) == noise
    assert not is_noise(ValueError(text))


def ending(code: object) -> BaseException | None:
    try:
        try:
            raise ValueError("the user's own mistake")
        except ValueError:
            sys.exit(code)  # type: ignore[arg-type]
    except SystemExit:
        return first_cause.uncaught()


def test_the_error_that_ends_a_process_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_cause.uncaught() is None
    assert ending(0) is None
    assert repr(ending(1)) == 'ValueError("the user\'s own mistake")', "a worker of multiprocessing ends so"
    error = ValueError("nobody caught it")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert first_cause.uncaught() is error


HANGS = """
    import threading, time
    from lightning_asyncpp.core import failure_watch
    from lightning_asyncpp.core.first_cause import Cause
    from tests.core.failures.test_watch import CAUSE, watching

    failure_watch.LEAVE_SECONDS = 0.5
    watch, _ = watching(CAUSE)
    threading.Thread(target=watch._learn, args=[CAUSE]).start()

    def waits_for_what_never_comes():
        time.sleep(1000)

    waits_for_what_never_comes()
"""


def test_a_rank_that_does_not_end_by_itself_is_ended_with_the_cause() -> None:
    done = run_script(HANGS)
    assert done.returncode == 1
    assert "in waits_for_what_never_comes" in done.stderr
    assert done.stderr.endswith(f"{CAUSE.line}\n")


# -- real processes -----------------------------------------------------------------------------------------------


def values(outcomes: list[Outcome]) -> list[Any]:
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes), [outcome.text for outcome in outcomes]
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_ends_all_that_wait(rank: int) -> None:
    outcomes = run_ranks(watched.killed, RANKS, rank)
    assert outcomes.pop(rank).error == "killed"
    for outcome in outcomes:
        assert outcome.error == "PeerLostError"
        assert " is gone: " in outcome.text
        assert outcome.seconds < watched.SOON


@pytest.mark.parametrize(
    "scenario", [watched.error_of_one, watched.error_of_one_while_others_compute], ids=["waiting", "computing"]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_what_the_others_raise(rank: int, scenario: Any) -> None:
    texts = values(run_ranks(scenario, RANKS, rank))
    line = f"rank {rank} (stage {RANKS - 1 - rank}) failed first: ValueError: the user's own mistake"
    assert texts.pop(rank) == "the user's own mistake"
    assert [text.partition("\n")[0] for text in texts] == [line] * 2
    assert "\n" not in texts[-1]
    if rank != 0:
        assert texts[0].endswith("    ValueError: the user's own mistake"), "users look at rank 0"


def test_rank_0_may_end_well_before_the_others() -> None:
    outcomes = run_ranks(watched.ends_early, RANKS)
    assert {outcome.error for outcome in outcomes} == {"killed"}, "none raised anything"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads and files in /proc")
def test_nothing_is_left_of_a_watch_that_has_ended() -> None:
    for once, often in values(run_ranks(watched.again_and_again, 2)):
        assert often == once

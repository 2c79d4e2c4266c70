"""What one rank does about a failure, without the others."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from lightning_asyncpp.core import background
from lightning_asyncpp.core.failures import at_exit, guard
from lightning_asyncpp.core.failures.cause import Cause
from lightning_asyncpp.core.failures.failure_watch import FailureWatch
from lightning_asyncpp.core.failures.guard import Guard
from lightning_asyncpp.core.failures.last_word import LastWord
from lightning_asyncpp.core.ranks.agreement import OtherStageFailedError
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.errors import ConfigurationError, PeerLostError, is_noise
from tests.core.failures.watched import Session

CAUSE = Cause(1, 0, "ValueError: the user's own mistake", "Traceback ...")


class End:
    """The end of a watch in which there is nobody else."""

    stopped = None

    def __init__(self, cause: Cause | None) -> None:
        self.cause = cause
        self.reported: list[Cause] = []
        self.waited: list[float] = []
        self.all_leave = False

    def leave(self, seconds: float) -> bool:
        self.waited.append(seconds)
        return self.all_leave

    def start(self) -> None: ...

    def end(self) -> None: ...

    def wait_for_cause(self, seconds: float) -> Cause | None:
        return self.cause

    def report(self, cause: Cause) -> None:
        self.reported.append(cause)


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen]]:
    processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])]
    yield list(processes)
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> Iterator[LastWord]:
    """What is said at the end is not said at that of the tests."""
    word = LastWord()
    monkeypatch.setattr(guard, "last_word", lambda: word)
    yield word
    word.cancel()


Guarded = Callable[[Cause | None], tuple[Guard, End, Session]]


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    """Makes a guard, given what went wrong first; it does not end this process, which is that of the tests."""
    made: list[tuple[Guard, End, Session]] = []

    def make(cause: Cause | None) -> tuple[Guard, End, Session]:
        end, session = End(cause), Session()
        monkeypatch.setattr(guard, "meet", lambda *_: end)
        watch = Guard(60.0, session)
        watch.begin(Mesh(2, 1, 0, groups="connected"))  # type: ignore[arg-type]
        made.append((watch, end, session))
        return made[-1]

    yield make
    for watch, _, _ in made:
        watch.release()
        assert watch._at_exit is not None
        watch._at_exit.cancel()


@pytest.mark.parametrize(
    "error",
    [PeerLostError("a neighbour is gone"), RuntimeError("[/gloo/pair.cc:5] Connection closed by peer [127.0.0.1]:1")],
    ids=["translated", "raw"],
)
def test_an_error_that_another_rank_caused_says_so(guarded: Guarded, error: Exception) -> None:
    watch, end, _ = guarded(CAUSE)
    watch.fail(error)
    assert str(error) == CAUSE.text
    assert end.reported == []


@pytest.mark.parametrize(
    "error", [ConfigurationError("lower it"), KeyError("own"), OtherStageFailedError("rank 1 (stage 0): it says why")]
)
def test_an_error_that_says_why_stays_as_it_is(guarded: Guarded, error: Exception) -> None:
    watch, _, _ = guarded(CAUSE)
    before = str(error)
    watch.fail(error)
    assert str(error) == before


def test_a_rank_that_lost_its_neighbour_and_is_told_nothing_tells_the_others(guarded: Guarded) -> None:
    watch, end, _ = guarded(None)
    watch.fail(PeerLostError("nothing came for 1800 seconds"))
    watch.fail(PeerLostError("a second time"))
    assert [cause.what for cause in end.reported] == [
        "lightning_asyncpp.errors.PeerLostError: nothing came for 1800 seconds"
    ]


@pytest.mark.parametrize("code", [0, None])
def test_a_rank_that_alone_ends_well_in_a_run_has_failed(guarded: Guarded, code: int | None) -> None:
    watch, end, _ = guarded(None)
    error = SystemExit(code)
    watch.leave(error)
    watch.fail(error)
    assert error.code == 1
    (cause,) = end.reported
    assert (
        cause.what == "SystemExit: 0 on this rank, while others go on: call sys.exit() on all ranks, at the same place"
    )


def test_ranks_that_all_end_well_in_a_run_have_not_failed(guarded: Guarded, words: LastWord) -> None:
    watch, end, _ = guarded(None)
    end.all_leave = True
    error = SystemExit(0)
    watch.leave(error)
    watch.fail(error)
    assert (error.code, end.reported) == (0, [])
    assert not words.children


@pytest.mark.parametrize(
    "error", [SystemExit(2), SystemExit("no such file"), SystemExit(""), ValueError("mine")], ids=repr
)
def test_who_ends_with_an_error_asks_nobody(guarded: Guarded, error: BaseException) -> None:
    watch, end, _ = guarded(None)
    watch.leave(error)
    watch.fail(error)
    assert end.waited == []
    assert len(end.reported) == 1


def test_a_session_that_fails_asks_first_whether_all_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are closed soon after a failure; those who decide need them until then."""
    watch, calls = FailureWatch(heartbeat=None), []
    watch.begin(Mesh(2, 1, 0, groups="connected"))  # type: ignore[arg-type]
    monkeypatch.setattr(watch.guard, "leave", lambda error: calls.append("asks"))
    monkeypatch.setattr(background, "run_later", lambda *_: calls.append("hangs up"))
    watch.fail(SystemExit(0))
    assert calls == ["asks", "hangs up"]


@pytest.mark.parametrize("is_torn_down", [True, False])
def test_what_follows_an_error_has_to_end_in_time_if_it_is_not_the_script(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, is_torn_down: bool
) -> None:
    left: list[str] = []
    monkeypatch.setattr(Guard, "_leave_now", lambda self: left.append("left"))
    monkeypatch.setattr(Guard, "_leave_seconds", 0.3)
    watch, _, _ = guarded(None)
    watch.is_torn_down = is_torn_down
    watch.fail(ValueError("mine"))
    time.sleep(1.0)
    assert left == ["left"] * is_torn_down


def test_what_is_torn_down_in_time_may_go_on(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "_leave_now", lambda self: pytest.fail("left"))
    monkeypatch.setattr(Guard, "_leave_seconds", 0.3)
    watch, _, _ = guarded(None)
    watch.is_torn_down = True
    watch.fail(ValueError("mine"))
    assert watch._deadline is not None
    watch.release()
    watch._deadline.join(5)
    assert watch._deadline.finished.is_set()


def test_children_outlive_neither_the_rank_nor_its_last_word(
    guarded: Guarded,
    words: LastWord,
    monkeypatch: pytest.MonkeyPatch,
    children: list[subprocess.Popen],
    capfd: pytest.CaptureFixture,
) -> None:
    """Lightning's observer reads the same list: what is in it no longer, it does not kill this rank for."""
    (child,) = children
    monkeypatch.setattr(Guard, "_leave_seconds", 0.3)
    watch, end, session = guarded(None)
    watch.children = children
    end.cause = CAUSE
    watch._learn(CAUSE)
    assert children == []
    assert session.lost == [(CAUSE.text, False)]
    watch.fail(PeerLostError("a neighbour is gone"))
    assert child.poll() is None, "it has time to say something, too"
    watch._exit()
    words.speak()
    assert child.poll() is not None
    assert capfd.readouterr().err == f"asyncpp: {CAUSE.line}\n"


def test_a_configuration_that_is_refused_leaves_children_to_lightning(
    guarded: Guarded, children: list[subprocess.Popen]
) -> None:
    watch, _, _ = guarded(None)
    watch.children = children
    watch.fail(ConfigurationError("lower it"))
    assert len(children) == 1


def test_nobody_watches_where_there_is_nobody_else_or_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "meet", lambda *_: pytest.fail("somebody watches"))
    Guard(60.0, Session()).begin(Mesh(1, 1, 0))
    Guard(None, Session()).begin(Mesh(2, 1, 0, groups="connected"))  # type: ignore[arg-type]


def test_a_session_raises_what_another_rank_did_once() -> None:
    session = PipelineSession(PipelineSettings())
    session.watch.lose(PeerLostError("rank 1 (stage 0) is gone: it was stopped"), is_gone=True)
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
        return at_exit.uncaught()


def test_the_error_that_ends_a_process_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert at_exit.uncaught() is None
    assert ending(0) is None
    assert repr(ending(1)) == 'ValueError("the user\'s own mistake")', "a worker of multiprocessing ends so"
    error = ValueError("nobody caught it")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert at_exit.uncaught() is error

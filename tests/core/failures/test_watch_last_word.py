"""What stands last in the output of a process: the failure that ended it, none that its script caught."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from lightning_asyncpp.core.failures import guard, last_word
from lightning_asyncpp.core.failures.cause import Cause, cause_of, mark
from lightning_asyncpp.core.failures.guard import Guard
from lightning_asyncpp.core.failures.last_word import LastWord
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.errors import PeerLostError
from tests.core.failures.watched import Session

FIRST = Cause(1, 0, "ValueError: in the first run", "Traceback ...")
SECOND = Cause(0, 1, "KeyError: in the second run", "Traceback ...")


class End:
    """The end of a watch that knows, or does not know, what went wrong."""

    stopped = None

    def __init__(self, cause: Cause | None) -> None:
        self.cause = cause

    def start(self) -> None: ...

    def end(self) -> None: ...

    def report(self, cause: Cause) -> None: ...

    def wait_for_cause(self, seconds: float) -> Cause | None:
        return self.cause


class Script:
    """A script of rank 0, of two: its runs, and how it ends."""

    def __init__(self, word: LastWord, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
        self.word, self._patch, self._capfd = word, monkeypatch, capfd
        self.guards: list[Guard] = []

    def start(self, cause: Cause | None = None, child_exits_with: int | None = None) -> Guard:
        """A run begins, in which that is going to happen; Lightning launches processes for the first one alone."""
        end = End(cause)
        self._patch.setattr(guard, "meet", lambda *_: end)
        watch = Guard(60.0, Session())
        if child_exits_with is not None:
            how = f"os._exit({child_exits_with})" if child_exits_with >= 0 else "os.abort()"
            command = [sys.executable, "-c", f"import os; {how}"]
            watch.children = [subprocess.Popen(command)]
        watch.begin(Mesh(2, 1, 0, groups="connected"))  # type: ignore[arg-type]
        self.guards.append(watch)
        return watch

    def fails(self, cause: Cause, child_exits_with: int | None = None) -> PeerLostError:
        """A run fails as another rank says: what its script is to catch."""
        watch = self.start(cause, child_exits_with)
        watch._learn(cause)
        error = PeerLostError("a neighbour is gone")
        watch.fail(error)
        watch.end()
        return error

    def ends(self, error: BaseException | None = None) -> str:
        """What stands last."""
        for module in (guard, last_word):
            self._patch.setattr(module, "uncaught", lambda: error)
        for watch in reversed(self.guards):
            watch._exit()
        self.word.speak()
        return str(self._capfd.readouterr().err)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Iterator[Script]:
    made = Script(LastWord(), monkeypatch, capfd)
    monkeypatch.setattr(guard, "last_word", lambda: made.word)
    yield made
    for watch in made.guards:
        watch.release()
        if watch._at_exit is not None:
            watch._at_exit.cancel()
    made.word.cancel()


def test_a_failure_that_ends_the_script_stands_last(script: Script) -> None:
    assert script.ends(script.fails(FIRST, child_exits_with=1)) == f"asyncpp: {FIRST.line}\n"


@pytest.mark.parametrize("again", [0, 1])
def test_after_a_script_that_caught_all_failures_and_ends_well_nothing_is_said(script: Script, again: int) -> None:
    script.fails(FIRST, child_exits_with=0)
    for _ in range(again):
        script.fails(SECOND)
    assert script.ends() == ""


def test_after_a_failure_that_was_caught_a_run_ends_well(script: Script) -> None:
    script.fails(FIRST, child_exits_with=0)
    script.start().end()
    assert script.ends() == ""


def test_of_two_failures_the_one_that_was_not_caught_stands_last(script: Script) -> None:
    script.fails(FIRST, child_exits_with=1)
    assert script.ends(script.fails(SECOND)) == f"asyncpp: {SECOND.line}\n"


def test_a_failure_that_is_raised_after_a_later_run_is_known(script: Script) -> None:
    """As by a script that goes on with the next value, and says at its end what went wrong."""
    error = script.fails(FIRST, child_exits_with=1)
    script.start().end()
    raised = RuntimeError("not all runs went well")
    raised.__cause__ = error
    assert script.ends(raised) == f"asyncpp: {FIRST.line}\n"


def test_an_error_of_the_script_itself_after_a_failure_that_was_caught(script: Script) -> None:
    script.fails(FIRST, child_exits_with=1)
    assert script.ends(OSError("the disk is full")) == "asyncpp: rank 0 (stage 1) failed: OSError: the disk is full\n"


def test_a_script_that_calls_exit_with_another_code_than_0_did_not_catch_the_failure(script: Script) -> None:
    """As the command does; Python does not say so at the end of a process, but the other ranks do the same."""
    script.fails(FIRST, child_exits_with=2)
    assert script.ends() == f"asyncpp: {FIRST.line}\n"


def test_a_crash_at_the_end_of_another_rank_is_not_the_failure_that_was_caught(script: Script) -> None:
    """Threads of a run that failed may end so, after the script has ended well."""
    script.fails(FIRST, child_exits_with=-6)
    assert script.ends() == ""


def test_two_runs_at_once_of_which_one_fails(script: Script) -> None:
    """Two strategies of Fabric; whoever ends with an error tells those of the other what it was."""
    other = script.start(child_exits_with=1)
    error = script.fails(FIRST)
    assert script.ends(error) == f"asyncpp: {FIRST.line}\n"
    assert other._cause is not None


def test_a_failure_that_the_script_does_not_know_ends_the_process(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(last_word.os, "_exit", codes.append)
    script.start(FIRST)._learn(FIRST)
    assert script.ends() == f"asyncpp: {FIRST.line}\n"
    assert codes == [1]


def test_a_failure_that_the_script_does_not_know_is_past_when_all_ranks_train_again(script: Script) -> None:
    script.start(FIRST)._learn(FIRST)
    script.start().end()
    assert script.ends() == ""


def test_the_cause_is_found_on_whatever_an_error_came_from() -> None:
    error, later, last = ValueError("mine"), KeyError("later"), TypeError("last")
    later.__context__, last.__cause__ = error, later
    error.__context__ = last  # a circle, which Python itself only makes with much effort
    assert cause_of(last) is None
    mark(error, FIRST)
    assert cause_of(last) == FIRST
    assert cause_of(None) is None

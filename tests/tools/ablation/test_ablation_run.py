"""Running an ablation: what is run, kept, discarded and killed; most tests only pretend to train."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp.tools.ablation.recipe.rows import Plan
from lightning_asyncpp.tools.ablation.run import training_folders as ablate_table
from lightning_asyncpp.tools.ablation.run.conditions import slots
from lightning_asyncpp.tools.ablation.run.training_runner import Runner, Running
from tests.tools.ablation.pretending import Told, results_of, run, table_of
from tests.tools.ablation.small import ADAMW, write_ablation

ROOT = Path(__file__).parents[3]


@pytest.mark.usefixtures("pretend")
def test_all_is_run_once_and_the_tables_hold_it(tmp_path: Path) -> None:
    table = table_of(tmp_path, [0.1, 0.2, 9.0], seeds=[1, 2])
    _, told = run(table)
    assert sorted(told.names) == ["0.1/1:finished", "0.1/2:finished", "0.2/1:finished", "9/1:diverged"]
    assert told.most == 2
    rows = results_of(table.folder)
    assert [(r["lr"], r["seed"], r["status"], r["loss"]) for r in rows] == [
        ("0.1", "1", "finished", "0.1"), ("0.1", "2", "finished", "0.1"), ("0.2", "1", "finished", "0.2"),
        ("9", "1", "diverged", ""),
    ]  # fmt: skip
    assert " ".join(rows[0]) == (
        "table optimizer correction delay stages momentum lr seed status loss steps seconds cell variant"
    )
    assert (table.folder / "curves.csv").read_text().splitlines()[:2] == [
        "cell,step,metric,value",
        f"{rows[0]['cell']},1,val_loss,9.0",
    ]


@pytest.mark.usefixtures("pretend")
def test_the_first_run_prepares_the_data_before_others_start(tmp_path: Path) -> None:
    _, told = run(table_of(tmp_path, [0.1, 0.2, 0.3, 0.4]), workers=4)
    assert told.alone
    assert told.most > 1


@pytest.mark.usefixtures("pretend")
def test_what_is_finished_is_never_run_again_and_the_tables_stay_bitwise(tmp_path: Path) -> None:
    table = table_of(tmp_path, [0.1, 0.2])
    run(table)
    tables = [(table.folder / name).read_bytes() for name in ("results.csv", "curves.csv")]
    _, told = run(table_of(tmp_path, [0.1, 0.2]))
    assert told.names == []
    assert [(table.folder / name).read_bytes() for name in ("results.csv", "curves.csv")] == tables


@pytest.mark.usefixtures("pretend")
def test_a_failure_leaves_the_others_alone_and_is_tried_again_by_the_next_run(tmp_path: Path) -> None:
    table = table_of(tmp_path, [0.1, 0.5], seeds=[1, 2], delays=[0, 1])
    runner, told = run(table)
    assert sorted(told.names) == ["0.1/1:finished"] * 2 + ["0.5/1:failed"] * 2
    assert {failure.code for failure in runner.failures} == {1}
    assert "this one fails" in runner.failures[0].log.read_text()
    assert [row["lr"] for row in results_of(table.folder)] == ["0.1", "0.1"]
    _, told = run(table_of(tmp_path, [0.1, 0.5], seeds=[1, 2], delays=[0, 1]))
    assert told.names == ["0.5/1:failed"] * 2


@pytest.mark.usefixtures("pretend")
@pytest.mark.parametrize(("lrs", "failures"), [([0.5], 3), pytest.param([0.1, 0.5], 5, marks=pytest.mark.slow)])
def test_no_more_are_started_when_the_first_runs_all_fail(tmp_path: Path, lrs: list[float], failures: int) -> None:
    runner, _ = run(table_of(tmp_path, lrs, delays=[0, 1, 2, 3, 4]), workers=1)
    assert len(runner.failures) == failures
    assert runner.gave_up == ("The first runs all failed: no more were started." if lrs == [0.5] else "")


@pytest.mark.usefixtures("pretend")
def test_what_failed_before_comes_last_and_stops_nothing_once_there_is_a_result(tmp_path: Path) -> None:
    rows = {"optimizers": {"Bad": ADAMW | {"lr": [0.5]}, "Good": ADAMW | {"lr": [0.1]}}, "delays": [0, 1, 2, 3]}
    runner, told = run(table_of(tmp_path, [], **rows), workers=1)
    assert (bool(runner.gave_up), told.names) == (True, ["0.5/1:failed"] * 3)
    runner, told = run(table_of(tmp_path, [], **rows), workers=1)
    assert told.names == ["0.5/1:failed", *["0.1/1:finished"] * 4, *["0.5/1:failed"] * 3]
    runner, told = run(table_of(tmp_path, [], **rows), workers=1)
    assert (runner.gave_up, told.names) == ("", ["0.5/1:failed"] * 4)


@pytest.mark.usefixtures("pretend")
def test_no_more_are_started_when_the_code_has_changed(tmp_path: Path) -> None:
    runner, told = run(table_of(tmp_path, [0.1, 0.75, 0.8]), workers=1)
    assert told.names == ["0.1/1:finished", "0.75/1:failed"]
    assert "code has changed" in runner.gave_up


@pytest.mark.usefixtures("pretend")
def test_a_full_disk_ends_no_training_and_the_tables_are_written_when_it_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_tables(*args: Any) -> None:
        writes.append(1)
        if len(writes) in full:
            raise OSError(28, "No space left on device", "results.csv")
        real(*args)

    real, writes, full = ablate_table.write_tables, [], [1, 2]
    monkeypatch.setattr(ablate_table, "write_tables", write_tables)
    runner, told = run(table_of(tmp_path, [0.1, 0.2, 0.3]), workers=1)
    assert len(told.names) == len(results_of(runner.table.folder)) == 3
    assert runner.trouble == ""
    assert len(told.warnings) == 2
    assert "No space left on device" in told.warnings[0]
    full = [5, 6]
    runner, told = run(table_of(tmp_path, [0.1, 0.2, 0.3, 0.4]), workers=1)
    assert told.names == ["0.4/1:finished"]
    assert "the tables cannot be written: OSError: [Errno 28]" in runner.trouble


@pytest.mark.usefixtures("pretend")
def test_what_cannot_be_started_ends_nothing_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_cell(key: Any, accelerator: str) -> Path:
        tries.append(key.lr)
        if key.lr == 0.2 and tries.count(0.2) in full:
            raise OSError(28, "No space left on device")
        return real(key, accelerator)

    table = table_of(tmp_path, [0.1, 0.2, 0.3])
    real, tries, full = table.make_cell, list[float](), [1]
    monkeypatch.setattr(table, "make_cell", make_cell)
    runner, told = run(table)
    assert sorted(told.names) == ["0.1/1:finished", "0.2/1:finished", "0.3/1:finished"]
    assert (tries, runner.trouble, len(told.warnings)) == ([0.1, 0.2, 0.2, 0.3], "", 1)
    table = table_of(tmp_path, [0.1, 0.2, 0.3, 0.4], delays=[2])
    real, tries, full = table.make_cell, [], [1, 2]
    monkeypatch.setattr(table, "make_cell", make_cell)
    runner, told = run(table, workers=1)
    assert told.names == ["0.1/1:finished"]
    assert "lr0.2" in runner.trouble


@pytest.mark.usefixtures("pretend")
def test_a_group_that_macos_calls_another_ones_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.killpg", refuse)
    _, told = run(table_of(tmp_path, [0.1]))
    assert told.names == ["0.1/1:finished"]


@pytest.mark.usefixtures("pretend")
def test_a_changed_recipe_runs_what_it_changes_and_leaves_the_rest_out_of_the_tables(tmp_path: Path) -> None:
    run(table_of(tmp_path, [0.1, 0.2]))
    table = table_of(tmp_path, [0.2, 0.3])
    _, told = run(table)
    assert told.names == ["0.3/1:finished"]
    assert [row["lr"] for row in results_of(table.folder)] == ["0.2", "0.3"]


@pytest.mark.usefixtures("pretend")
def test_nothing_runs_on_after_an_interrupt(tmp_path: Path) -> None:
    class Interrupting(Told):
        def show(self, plan: Plan, running: Sequence[Running]) -> None:
            pids.extend(r.process.pid for r in running)
            if any(r.progress() for r in running):
                raise KeyboardInterrupt

    pids: list[int] = []
    table = table_of(tmp_path, [0.25])
    with pytest.raises(KeyboardInterrupt):
        Runner(table, list(table.rows.values()), slots(1, 3, []), "cpu", Interrupting()).run()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert table.plan().pending


def processes_with(text: str) -> list[int]:
    """Processes whose command line holds ``text``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if text in (entry / "cmdline").read_bytes().decode(errors="replace"):
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def wait_for(condition: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    tool = [sys.executable, "-m", "lightning_asyncpp", "ablate", str(tmp_path / "grid.yaml")]
    return ["timeout", "-k", "5", "250", *tool]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_ablation_goes_on_where_it_was(tmp_path: Path, command: list[str], number: int) -> None:
    """The real thing: the runner is killed in the middle of a real training, and started again."""
    write_ablation(tmp_path, optimizers={"AdamW": ADAMW | {"lr": [0.003, 0.01, 0.03]}})
    cells = tmp_path / "out" / "cells"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = [*command[4:], "--workers", "1"]
    with (tmp_path / "printed").open("w") as printed:
        first = subprocess.Popen(arguments, env=environment, cwd=tmp_path, stdout=printed, stderr=printed)
        second = lambda: len(list(cells.glob("*/progress"))) == 2  # noqa: E731
        assert wait_for(second, 100), (tmp_path / "printed").read_text()
        os.kill(first.pid, number)
        code = first.wait(20)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 128 + number)
    assert wait_for(lambda: not processes_with(str(tmp_path)), 10), "a training outlives its runner"
    if number != signal.SIGKILL:
        assert "the same command goes on" in (tmp_path / "printed").read_text()
    finished = {path: path.stat().st_mtime_ns for path in cells.glob("*/result.json")}
    assert len(finished) < 3
    done = subprocess.run([*command, "--workers", "1"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert len(results_of(tmp_path / "out" / "tiny")) == 3
    assert done.stdout.count("finished  AdamW") == 3 - len(finished)


@pytest.mark.slow
def test_a_grid_of_real_trainings_finishes_with_its_report(tmp_path: Path, command: list[str]) -> None:
    """Of the two learning rates one diverges, and of another optimizer one training fails."""
    bad = ADAMW | {"lr": [0.01], "momentum": {"argument": "betas.0", "values": [0.9, 0.1]}}
    bad["class_path"] = "tests.tools.ablation.small.Fragile"
    write_ablation(tmp_path, optimizers={"AdamW": ADAMW | {"lr": [0.01, 1e30]}, "Bad": bad}, delays=[1])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--workers", "2"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = results_of(tmp_path / "out" / "tiny")
    assert [(r["optimizer"], r["momentum"], r["lr"], r["status"]) for r in rows] == [
        ("AdamW", "", "0.01", "finished"), ("AdamW", "", "1e+30", "diverged"), ("Bad", "0.9", "0.01", "finished"),
    ]  # fmt: skip
    # The same steps in two processes: the same loss to the last bit.
    assert rows[0]["loss"] == rows[2]["loss"]
    assert "this momentum is too low" in done.stdout
    assert "Bad_momentum0.1" in done.stderr
    assert (tmp_path / "out" / "tiny" / "table.md").exists()

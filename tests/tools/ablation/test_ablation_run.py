"""Running an ablation: what is run, kept, discarded and killed; most tests only pretend to train."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp.tools.ablation import command as ablate
from lightning_asyncpp.tools.ablation import report as ablate_report
from lightning_asyncpp.tools.ablation import run as ablate_run
from lightning_asyncpp.tools.ablation.recipe import load_recipe
from lightning_asyncpp.tools.ablation.results import CellResult, read_result, thinned, write_result
from lightning_asyncpp.tools.ablation.rows import Plan, make_rows
from lightning_asyncpp.tools.ablation.run import LOG, Runner, Running, Table, slots
from tests.tools.ablation.small import ADAMW, write_ablation

ROOT = Path(__file__).parents[3]
# Reads its learning rate from the folder's name and writes a result; some learning rates are special.
PRETENDER = """
import json, os, re, sys, time
folder = sys.argv[1]
open(folder + "/runs", "a").write("x")
lr = float(re.search("_lr([^_]+)_", folder)[1])
assert os.environ["OMP_NUM_THREADS"] == "3"
time.sleep(0.1)
if lr == 0.5: sys.exit("this one fails")
open(folder + "/progress", "w").write("1/2")
while lr == 0.25: time.sleep(1)
result = dict(status="finished", loss=lr, steps=2, seconds=1.0, curve=[[1, 9.0], [2, lr]])
if lr == 9.0: result.update(status="diverged", loss=None)
json.dump(result, open(folder + "/result.tmp", "w"))
os.replace(folder + "/result.tmp", folder + "/result.json")
"""


class Told:
    """Keeps what the runner tells."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.most = 0
        self.alone = True

    def ended(self, running: Running, result: CellResult | None) -> None:
        self.names.append(f"{running.key.lr:g}/{running.key.seed}:{result.status if result else 'failed'}")

    def show(self, plan: Plan, running: Sequence[Running]) -> None:
        self.most = max(self.most, len(running))
        self.alone = self.alone and (bool(self.names) or len(running) < 2 or any(r.progress() for r in running))


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablate_run, "worker_command", lambda folder: [sys.executable, "-c", PRETENDER, str(folder)])


def table_of(folder: Path, lrs: list[float], **changes: Any) -> Table:
    path = write_ablation(folder, text=False, **({"optimizers": {"AdamW": ADAMW | {"lr": lrs}}} | changes))
    recipe = load_recipe(path)
    return Table(recipe, make_rows(recipe), folder / "out" / "tiny")


def run(table: Table, workers: int = 2) -> tuple[Runner, Told]:
    told = Told()
    runner = Runner(table, list(table.rows.values()), slots(workers, 3, []), "cpu", told)
    runner.run()
    return runner, told


def results_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


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
        "table optimizer correction delay stages momentum lr seed status loss steps seconds cell"
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
def test_a_half_written_run_is_discarded_and_run_again(tmp_path: Path) -> None:
    table = table_of(tmp_path, [0.1, 0.2])
    run(table)
    folder = next((table.folder.parent / "cells").glob("*lr0.2*"))
    text = (folder / "result.json").read_text()
    (folder / "result.json").write_text(text[: len(text) // 2])
    (folder / "left over").touch()
    again = table_of(tmp_path, [0.1, 0.2])
    _, told = run(again)
    assert told.names == ["0.2/1:finished"]
    assert not (folder / "left over").exists()
    assert (folder / "runs").read_text() == "x"


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
@pytest.mark.parametrize(("lrs", "failures"), [([0.5], 3), ([0.1, 0.5], 5)])
def test_no_more_are_started_when_the_first_runs_all_fail(tmp_path: Path, lrs: list[float], failures: int) -> None:
    runner, _ = run(table_of(tmp_path, lrs, delays=[0, 1, 2, 3, 4]), workers=1)
    assert len(runner.failures) == failures
    assert runner.gave_up == (lrs == [0.5])


@pytest.mark.usefixtures("pretend")
def test_a_changed_recipe_runs_what_it_changes_and_leaves_the_rest_out_of_the_tables(tmp_path: Path) -> None:
    run(table_of(tmp_path, [0.1, 0.2]))
    table = table_of(tmp_path, [0.2, 0.3])
    _, told = run(table)
    assert told.names == ["0.3/1:finished"]
    assert [row["lr"] for row in results_of(table.folder)] == ["0.2", "0.3"]


@pytest.mark.usefixtures("pretend")
def test_what_another_row_of_another_name_has_trained_is_taken_over(tmp_path: Path) -> None:
    run(table_of(tmp_path, [0.1, 0.2]))
    beta = {"argument": "betas.0", "values": [0.9, 0.5]}
    table = table_of(tmp_path, [0.1, 0.2], optimizers={"other": ADAMW | {"lr": [0.1, 0.2], "momentum": beta}})
    _, told = run(table)
    assert sorted(told.names) == ["0.1/1:finished", "0.2/1:finished"]  # of the momentum that is new
    assert [row["optimizer"] for row in results_of(table.folder)] == ["other"] * 4


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


@pytest.mark.usefixtures("pretend")
def test_the_command_ends_with_1_and_names_the_failed_runs_and_their_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablate, "find_problems", lambda recipe: [])
    reported: list[Path] = []
    monkeypatch.setattr(ablate_report, "write_report", reported.append)
    path = write_ablation(tmp_path, text=False, optimizers={"AdamW": ADAMW | {"lr": [0.1, 0.5]}})
    with pytest.raises(SystemExit) as end:
        ablate.main([str(path), "--workers", "2", "--threads", "3"])
    assert end.value.code == 1
    printed = capsys.readouterr()
    assert "this one fails" in printed.out
    (log,) = tmp_path.glob(f"out/cells/*lr0.5*/{LOG}")
    assert str(log) in printed.err
    assert reported == [tmp_path / "out" / "tiny"]
    ablate.main([str(path), "--dry-run"])
    assert "1 rows; 2 runs to search the learning rates; at most 2 runs in total; 1 done" in capsys.readouterr().out


@pytest.mark.usefixtures("pretend")
def test_a_second_runner_is_refused_while_the_first_one_lives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablate, "find_problems", lambda recipe: [])
    path = write_ablation(tmp_path, text=False)
    output = tmp_path / "out"
    output.mkdir()
    holder = "import fcntl, time; f = open('lock', 'w'); fcntl.flock(f, 2); print('locked', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holder], cwd=output, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(SystemExit) as end:
            ablate.main([str(path), "--threads", "3"])
        other.kill()
    assert end.value.code == 2
    assert "in use by another `asyncpp ablate`" in capsys.readouterr().err
    assert not (output / "cells").exists()
    ablate.main([str(path), "--threads", "3"])  # the lock of the dead one is free
    assert len(results_of(output / "tiny")) == 2


def test_slots_share_cores_and_gpus() -> None:
    assert len(slots(None, 4, [], cores=lambda: 10)) == 2
    assert len(slots(None, 4, [], cores=lambda: 2)) == 1
    assert [s["CUDA_VISIBLE_DEVICES"] for s in slots(None, 2, ["0", "1", "1"])] == ["0", "1", "1"]
    assert slots(1, 2, [])[0] == {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}


def test_results_are_read_as_written_and_anything_else_is_none(tmp_path: Path) -> None:
    result = CellResult("finished", 1.5, 10, 2.0, curve=[(5, 2.0), (10, 1.5)], train_curve=[(10, 3.0)])
    write_result(tmp_path, result)
    assert read_result(tmp_path) == result
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    for wrong in ({"status": "finished", "loss": None}, {"status": "odd"}, {"status": "finished", "loss": 1}, []):
        (tmp_path / "result.json").write_text(json.dumps(wrong))
        assert read_result(tmp_path) is None
    assert read_result(tmp_path / "none") is None


def test_long_curves_are_thinned_to_means() -> None:
    curve = [(step, float(step)) for step in range(1, 1001)]
    assert len(thinned(curve)) == 200
    assert thinned(curve)[:2] == [(5, 3.0), (10, 8.0)]
    assert thinned(curve[:3]) == curve[:3]
    assert thinned([]) == []


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
    """Of the two learning rates one diverges, and a third training cannot start at all."""
    bad = ADAMW | {"lr": [0.01], "momentum": {"argument": "betas.0", "values": [0.9, 1.5]}}
    write_ablation(tmp_path, optimizers={"AdamW": ADAMW | {"lr": [0.01, 1e30]}, "Bad": bad}, delays=[1])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--workers", "2"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = results_of(tmp_path / "out" / "tiny")
    assert [(r["optimizer"], r["momentum"], r["lr"], r["status"]) for r in rows] == [
        ("AdamW", "", "0.01", "finished"), ("AdamW", "", "1e+30", "diverged"), ("Bad", "0.9", "0.01", "finished"),
    ]  # fmt: skip
    # The same optimizer under two names, in two processes: the same loss to the last bit.
    assert rows[0]["loss"] == rows[2]["loss"]
    assert "Invalid beta parameter" in done.stdout
    assert "Bad_momentum1.5" in done.stderr
    assert (tmp_path / "out" / "tiny" / "table.md").exists()

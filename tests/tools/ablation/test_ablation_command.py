"""The command ``asyncpp ablate``: what it refuses and tells, and the code that it ends with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp.tools.ablation import ablate
from lightning_asyncpp.tools.ablation.report import __main__ as ablate_report
from lightning_asyncpp.tools.ablation.run import training_folders as ablate_table
from lightning_asyncpp.tools.ablation.run.conditions import versions
from lightning_asyncpp.tools.ablation.run.training_folders import LOG
from tests.tools.ablation.pretending import results_of
from tests.tools.ablation.small import ADAMW, write_ablation

pytestmark = pytest.mark.usefixtures("pretend", "quick")


def ended(*arguments: str) -> Any:
    """The code that the command ends with."""
    with pytest.raises(SystemExit) as end:
        ablate.main([*arguments, "--threads", "3"])
    return end.value.code


def test_the_command_ends_with_1_and_names_the_failed_runs_and_their_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_second_runner_is_refused_while_the_first_one_lives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_dry_run_tells_how_long_the_rest_takes_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_ablation(tmp_path, text=False))
    ablate.main([path, "--dry-run"])
    assert "about" not in capsys.readouterr().out
    ablate.main([path, "--threads", "3"])
    write_ablation(tmp_path, text=False, optimizers={"AdamW": ADAMW | {"lr": [0.001, 0.01, 0.1, 0.2, 0.3, 0.4]}})
    capsys.readouterr()
    ablate.main([path, "--dry-run", "--workers", "2"])
    assert "about 0:00:02 left with 2 at once" in capsys.readouterr().out


def test_a_mixture_of_versions_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_ablation(tmp_path, text=False))
    ablate.main([path, "--threads", "3"])
    assert "warning" not in capsys.readouterr().err
    for result, torch in zip(sorted(tmp_path.glob("out/cells/*/result.json")), ("0.4.1", "2.15.0")):
        content = json.loads(result.read_text())
        result.write_text(json.dumps(content | {"versions": versions("cpu", 3) | {"torch": torch}}))
    ablate.main([path, "--threads", "3"])
    told = capsys.readouterr().err
    assert told.count("warning") == 1
    assert "torch 0.4.1 (1 run), 2.15.0 (1 run). Their" in told


def test_a_table_of_another_recipe_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_ablation(tmp_path, text=False)
    other = tmp_path / "other.yaml"
    other.write_text(path.read_text().replace("0.001", "0.1"))
    ablate.main([str(path), "--threads", "3"])
    before = (tmp_path / "out" / "tiny" / "results.csv").read_bytes()
    assert ended(str(other)) == ended(str(other), "--dry-run") == 2
    assert f"tiny is the table of another recipe, {path}; give this one another name" in capsys.readouterr().err
    assert (tmp_path / "out" / "tiny" / "results.csv").read_bytes() == before


def test_a_result_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_ablation(tmp_path, text=False))
    ablate.main([path, "--threads", "3"])
    result = next(tmp_path.glob("out/cells/*/result.json"))
    result.unlink()
    result.mkdir()
    assert ended(path) == 1
    told = capsys.readouterr().err
    assert told.startswith("asyncpp ablate: error: [Errno 21] Is a directory")
    assert str(result) in told
    assert len(told.splitlines()) == 1


def test_tables_that_cannot_be_written_at_last_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    path = str(write_ablation(tmp_path, text=False))
    with monkeypatch.context() as full:
        full.setattr(ablate_table, "write_tables", write)
        assert ended(path) == 1
    printed = capsys.readouterr()
    assert printed.out.count("finished  AdamW") == 2
    assert printed.err.splitlines()[-1].startswith("asyncpp ablate: error: the tables cannot be written: OSError")
    with monkeypatch.context() as full:
        full.setattr(ablate_report, "write_report", write)
        assert ended(path) == 1
    assert "error: the report cannot be written: [Errno 28] No space" in capsys.readouterr().err
    ablate.main([path, "--threads", "3"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_plots_are_drawn_ends_the_command_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(ablate_report, "write_report", lambda folder: signal.raise_signal(number))
    path = str(write_ablation(tmp_path, text=False))
    assert ended(path) == 128 + number
    assert "Stopped. 2 runs are kept" in capsys.readouterr().out
    assert (tmp_path / "out" / "tiny" / "table.md").exists()


def test_on_windows_it_says_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert ended("grid.yaml") == "asyncpp ablate: error: it runs on Linux and macOS only"

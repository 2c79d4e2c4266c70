"""Interruptions: nothing looks complete, nothing is lost or comes twice, and the result is bit for bit the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp.cli import main
from lightning_asyncpp.data import BPETokenizer, DataError, TextDataModule
from lightning_asyncpp.tools.prepare import assemble as assemble_module
from lightning_asyncpp.tools.prepare import pieces as piece_module
from lightning_asyncpp.tools.prepare import preparation as run_module
from lightning_asyncpp.tools.prepare.preparation import prepare
from lightning_asyncpp.tools.prepare.source_files import Documents
from lightning_asyncpp.tools.prepare.work_plan import Request
from tests.tools.prepare.corpus import content, make_texts, request, write


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", make_texts(), "parquet")


@pytest.fixture
def whole(source: Path, tmp_path: Path) -> dict[str, bytes]:
    """What an uninterrupted run writes: some ten pieces, with a trained vocabulary."""
    prepare(request(source, tmp_path / "whole", tokenizer="bpe", vocab_size=300))
    return content(tmp_path / "whole")


def interrupted(asked: Request, calls: int, module: Any, name: str) -> bool:
    """Prepare, and let the call after so many of ``module.name`` be interrupted; whether that came about."""
    original, done = getattr(module, name), []

    def counting(*arguments: Any) -> Any:
        done.append(1)
        if len(done) > calls:
            raise KeyboardInterrupt
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, counting)
        try:
            prepare(asked)
        except KeyboardInterrupt:
            return True
    return False


@pytest.mark.parametrize(
    ("calls", "module", "name"),
    [
        (0, run_module, "make_plan"),
        pytest.param(0, piece_module, "_tokenise", marks=pytest.mark.slow),
        pytest.param(8, piece_module, "_tokenise", marks=pytest.mark.slow),
        (4, piece_module, "_publish"),
        pytest.param(0, run_module, "assemble", marks=pytest.mark.slow),
        (0, assemble_module, "_merge_training"),
        (0, assemble_module, "_write_validation"),
        (0, assemble_module, "write_metadata"),
    ],
)
def test_a_resumed_run_ends_as_an_uninterrupted_one(
    source: Path, tmp_path: Path, whole: dict[str, bytes], calls: int, module: Any, name: str
) -> None:
    asked = request(source, tmp_path / "out", tokenizer="bpe", vocab_size=300)
    assert interrupted(asked, calls, module, name)
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match=r"has not ended|no such folder"):
        TextDataModule(source=str(tmp_path / "out")).prepare_data()
    prepare(asked)
    assert content(tmp_path / "out") == whole
    assert not (tmp_path / "out.partial").exists()


def test_a_run_may_be_interrupted_again_and_again(source: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    asked = request(source, tmp_path / "out", tokenizer="bpe", vocab_size=300)
    interruptions = 0
    while not (tmp_path / "out").exists():
        interruptions += interrupted(asked, 3, piece_module, "_tokenise")
    assert interruptions > 2
    assert content(tmp_path / "out") == whole


def test_pieces_that_are_done_are_not_done_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(source, tmp_path / "out")
    assert interrupted(asked, 4, piece_module, "_publish")
    assert len(list((tmp_path / "out.partial" / "pieces").glob("0*"))) == 4
    documents = []
    original = piece_module._tokenise

    def counted(work: Any, some: Documents, *rest: Any) -> Any:
        documents.extend(some.texts)
        return original(work, some, *rest)

    monkeypatch.setattr(piece_module, "_tokenise", counted)
    prepare(asked)
    assert 0 < len(documents) < 200


def test_a_resumed_run_keeps_to_what_it_began_with(source: Path, tmp_path: Path) -> None:
    asked = request(source, tmp_path / "out")
    assert interrupted(asked, 4, piece_module, "_publish")
    with pytest.raises(DataError, match=r"begun with other arguments \(piece_mb: 0.01, and now 0.02\)"):
        prepare(request(source, tmp_path / "out", piece_mb=0.02))
    changed = source / "002.parquet"
    os.utime(changed, ns=(0, 0))
    with pytest.raises(DataError, match=rf"changed, new or gone since the work began: {changed}; make them what"):
        prepare(asked)
    with pytest.raises(DataError, match="changed, new or gone"):
        run_module.estimate(asked)
    changed.unlink()
    with pytest.raises(DataError, match="changed, new or gone"):
        prepare(asked)


def test_a_resumed_run_refuses_new_files(source: Path, tmp_path: Path) -> None:
    asked = request(source, tmp_path / "out")
    assert interrupted(asked, 4, piece_module, "_publish")
    for index in range(7):
        (source / f"new{index}.parquet").write_bytes((source / "000.parquet").read_bytes())
    with pytest.raises(DataError, match=rf"new or gone since the work began: {source}/new0.*new4.parquet and 2 more; "):
        prepare(asked)


def test_a_resumed_run_refuses_another_tokenizer_of_the_same_name(source: Path, tmp_path: Path) -> None:
    for size in (300, 290):
        (tmp_path / str(size)).mkdir()
        BPETokenizer.train(make_texts(), size).save(tmp_path / str(size))
    given = tmp_path / "300" / "tokenizer.json"
    asked = request(source, tmp_path / "out", tokenizer=str(given))
    assert interrupted(asked, 4, piece_module, "_publish")
    before = given.read_bytes()
    given.write_bytes((tmp_path / "290" / "tokenizer.json").read_bytes())
    with pytest.raises(
        DataError, match=r"tokenizer\.json: is not what it was when the work began; restore it, or delete"
    ):
        prepare(asked)
    given.write_bytes(before)
    prepare(asked)


def test_a_dry_run_tells_what_would_go_on(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert interrupted(request(source, tmp_path / "out"), 4, piece_module, "_publish")
    arguments = [
        "prepare",
        str(source),
        "--output",
        str(tmp_path / "out"),
        "--tokenizer",
        "byte",
        "--val-fraction",
        "0.1",
    ]
    main([*arguments, "--piece-mb", "0.01", "--dry-run"])
    assert "out (begun: it would go on)" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--piece-mb", "0.02", "--dry-run"])
    said = capsys.readouterr().err
    assert "was begun with other arguments (piece_mb: 0.01, and now 0.02)" in said
    assert "the same command goes on" not in said  # it would not


def test_remains_of_a_run_that_was_killed_while_it_tidied_up_are_not_taken_for_work(
    source: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    asked = request(source, tmp_path / "out", tokenizer="bpe", vocab_size=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble_module.shutil, "rmtree", lambda *_, **__: None)
        prepare(request(source, tmp_path / "out"))  # bytes
    assert (tmp_path / "out.partial" / "pieces" / "000000" / "record.json").exists()
    shutil.rmtree(tmp_path / "out")
    prepare(asked)
    assert content(tmp_path / "out") == whole


@pytest.mark.parametrize("damage", ["record", "chunk"])
def test_a_damaged_piece_is_named_and_done_anew(
    source: Path, tmp_path: Path, whole: dict[str, bytes], damage: str
) -> None:
    asked = request(source, tmp_path / "out", tokenizer="bpe", vocab_size=300)
    assert interrupted(asked, 4, piece_module, "_publish")
    piece = tmp_path / "out.partial" / "pieces" / "000002"
    if damage == "record":
        (piece / "record.json").write_text("")
    else:
        next(piece.glob("chunk-*")).unlink()
    with pytest.raises(
        DataError, match=rf"{piece}.* (is damaged|is gone).*; delete {piece}, and run the command again"
    ):
        prepare(asked)
    shutil.rmtree(piece)
    prepare(asked)
    assert content(tmp_path / "out") == whole


def test_a_run_that_ends_while_another_begins_leaves_it_nothing_to_do(source: Path, tmp_path: Path) -> None:
    asked = request(source, tmp_path / "out")
    prepare(asked)
    original, looked = run_module._is_done, []

    def first_look_came_too_early(request: Request) -> bool:
        looked.append(1)
        return len(looked) > 1 and original(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "_is_done", first_look_came_too_early)
        assert prepare(asked) is None
    assert not (tmp_path / "out.partial").exists()


def test_a_damaged_plan_is_reported(source: Path, tmp_path: Path) -> None:
    asked = request(source, tmp_path / "out")
    assert interrupted(asked, 1, piece_module, "_publish")
    plan = tmp_path / "out.partial" / "plan.json"
    good = json.loads(plan.read_text())
    plan.write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        prepare(asked)
    plan.write_text(json.dumps({**good, "format": 99}))
    with pytest.raises(DataError, match="of another release"):
        prepare(asked)


def test_a_second_run_at_the_same_time_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:

        def second(*_: Any) -> None:
            with pytest.raises(DataError, match="another `asyncpp prepare` is at work there"):
                prepare(request(source, tmp_path / "out"))
            raise KeyboardInterrupt

        patch.setattr(run_module, "_write_missing", second)
        with pytest.raises(KeyboardInterrupt):
            prepare(request(source, tmp_path / "out"))
    assert prepare(request(source, tmp_path / "out")) is not None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_processes_end_with_the_command_which_goes_on_later(tmp_path: Path, ending: signal.Signals) -> None:
    source = write(tmp_path / "source", make_texts(8000), "jsonl")
    arguments = [str(source), "--output", "out", "--tokenizer", "bpe", "--vocab-size", "300", "--piece-mb", "0.1"]
    command = [sys.executable, "-m", "lightning_asyncpp", "prepare", *arguments, "--num-workers", "2"]
    begun = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    pieces = tmp_path / "out.partial" / "pieces"
    while not (pieces / "000002").exists():
        assert begun.poll() is None
        time.sleep(0.02)
    begun.send_signal(ending)
    printed = begun.communicate(timeout=240)[1]  # a busy machine takes long to end a process
    assert begun.returncode == (-9 if ending == signal.SIGKILL else 130)
    if ending != signal.SIGKILL:
        assert f"interrupted. What is done is kept in {Path('out.partial')}; the same command goes on" in printed
    deadline = time.monotonic() + 30
    while members(begun.pid):
        assert time.monotonic() < deadline, "its processes live on"
        time.sleep(0.1)
    done = len(list(pieces.glob("0*")))
    assert 0 < done < len(json.loads((tmp_path / "out.partial" / "plan.json").read_text())["pieces"])
    assert not (tmp_path / "out").exists()
    subprocess.run(command, cwd=tmp_path, check=True, timeout=200)
    prepare(request(source, tmp_path / "whole", tokenizer="bpe", vocab_size=300, val_fraction=0.001, piece_mb=0.1))
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def members(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(process.name))
    return found

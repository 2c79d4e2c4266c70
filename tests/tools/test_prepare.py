"""``asyncpp prepare`` writes every document once into a dataset for training, and resumes after an interruption."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_asyncpp.data import DataError, TextDataModule, Tokenizer
from lightning_asyncpp.tools.prepare import find_pieces, main
from tests.helpers import programs as forked

TEXTS = [f"document {index} größe 漢字 " + "word " * (index % 50) for index in range(800)]


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """Write the documents into files of four formats, and return the sources."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lines = [json.dumps({"text": text, "id": index}) + "\n" for index, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("".join(lines[:400]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[400:500]).encode()))
    parquet.write_table(pyarrow.table({"text": [*TEXTS[500:799], ""]}), tmp_path / "c.parquet", row_group_size=50)
    (tmp_path / "d.txt").write_text(TEXTS[799])
    return [str(tmp_path / "a.jsonl"), str(tmp_path / "*.gz"), f"file://{tmp_path}/c.parquet", str(tmp_path / "d.txt")]


SMALL_PIECES = """
import sys
from lightning_asyncpp.tools import prepare
prepare.CHUNK_BYTES, prepare._LEAST_BYTES = 3000, 1000
prepare.main(sys.argv[1:])
"""


def documents(folder: Path) -> list[str]:
    """Return the documents of both splits."""
    found: list[str] = []
    for split in ("train", "val"):
        for chunk in json.loads((folder / split / "index.json").read_text())["chunks"]:
            content = (folder / split / chunk["filename"]).read_bytes()
            found += content[len(content) - chunk["dim"] :].decode().split("\0")[:-1]
    return found


def test_every_document_is_there_once_and_trained_on(sources: list[str], tmp_path: Path) -> None:
    """An interruption loses and repeats no document: the first run is killed once a chunk is written."""
    command = [*sources, "--output", str(tmp_path / "out"), "--tokenizer", "byte", "--val-fraction", "0.1"]
    program = ["-c", SMALL_PIECES, *command, "--num-workers", "2"]
    first = forked.start(program, tmp_path, tmp_path / "first.out", tmp_path / "first.err", {})
    while first.is_alive() and not list(tmp_path.glob("out/train/.checkpoints/checkpoint-*")):
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(first.pid, signal.SIGKILL)
    first.join()
    assert not (tmp_path / "out" / "metadata.json").exists()
    second = forked.run([*program, "--num-workers", "1"], tmp_path, seconds=200)  # goes on with two
    assert second.returncode == 0, second.stderr
    read = [text for text in documents(tmp_path / "out") if text != " "]  # a piece in which no line begins
    assert sorted(read) == sorted(TEXTS)
    data = TextDataModule(str(tmp_path / "out"), context_length=16, batch_size=2)
    data.setup()
    assert len(data.val_dataloader()) > 5
    assert "word" in data.tokenizer.decode(next(iter(data.train_dataloader())).flatten())
    for other in ([*command, "--val-fraction", "0.2"], command[1:]):
        with pytest.raises(DataError, match="was begun with another tokenizer"):
            main(other)


def test_a_tokenizer_json_ends_documents_by_its_own_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text(Tokenizer.train(TEXTS, 300).definition)
    for folder in (tmp_path / "x" / "1", tmp_path / "x" / "2"):
        folder.mkdir(parents=True)
        (folder / "same.txt").write_text("document <|endoftext|>")
    source, output = str(tmp_path / "x"), str(tmp_path / "out")
    assert [piece.name for piece in find_pieces(source, "text", 3)] == ["3:1/same.txt", "3:2/same.txt"]
    command = ["--output", output, "--tokenizer", str(tmp_path), "--num-workers", "1", "--val-fraction"]
    for path, share in ((f"{source}/1", "0.1"), (source, "1.0"), (source, "-0.1")):
        with pytest.raises(DataError, match=f"{share} .--val-fraction"):
            main([path, *command, share])
    main([source, *command, "0"])
    assert "vocab_size=300" in capsys.readouterr().out
    data = TextDataModule(output, context_length=1, batch_size=1, shuffle=False)
    data.setup()
    tokens = [token for batch in data.train_dataloader() for token in batch.flatten().tolist()]
    assert tokens.count(0) == 2  # the token's spelling in a text ends nothing


def test_a_wrong_document_is_named_and_ends_all_processes(tmp_path: Path) -> None:
    reader, writer = os.pipe()  # the processes inherit it
    for name, content, message in (
        ("a.jsonl", b'{"text": "fine"}\n{"txt": 1}\n', r"a\.jsonl, line at byte 17, .*KeyError: 'text'"),
        ("b.jsonl", b'{"text": 5}\n', "5 is not text"),
        ("c.txt", b"\xff", r"c\.txt cannot be read .*'utf-8' codec"),
    ):
        (tmp_path / name).write_bytes(content)
        command = [str(tmp_path / name), "--output", str(tmp_path / "out" / name), "--tokenizer", "byte"]
        with pytest.raises(DataError, match=message):
            main([*command, "--val-fraction", "0", "--num-workers", "2"])
    os.close(writer)
    assert os.read(reader, 1) == b""  # once no process holds the other end

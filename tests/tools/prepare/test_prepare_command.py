"""The command: mistakes are named, all at once, before anything is read; a dry run writes nothing."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_asyncpp.cli import main
from lightning_asyncpp.data import DataError
from lightning_asyncpp.tools.prepare import pieces as piece_module
from lightning_asyncpp.tools.prepare.preparation import prepare
from tests.data.test_file_errors import refusing
from tests.tools.prepare.corpus import make_texts, request, write


def run(*arguments: str) -> None:
    main(["prepare", *arguments, "--num-workers", "0", "--piece-mb", "0.01"])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit, match="2"):
        run(*arguments)
    return capsys.readouterr().err


def test_prepared_verified_and_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "source", [*make_texts(40), ""], "jsonl")
    before = signal.getsignal(signal.SIGTERM)
    arguments = ("--output", str(tmp_path / "out"), "--tokenizer", "byte", "--val-fraction", "0.1")
    run(str(source), *arguments, "--verify")
    printed = capsys.readouterr().out
    assert "from 40 documents (" in printed
    assert "1 documents without text were left out." in printed
    assert f"--data.source {tmp_path / 'out'}, with a model of vocab_size=256 or more." in printed
    run(str(source), *arguments)
    assert "was prepared before, with the same arguments; nothing to do." in capsys.readouterr().out
    chunk = next((tmp_path / "out" / "train").glob("chunk-*"))
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")
    said = refused(
        capsys,
        str(source),
        "--output",
        str(tmp_path / "out"),
        "--tokenizer",
        "byte",
        "--val-fraction",
        "0.1",
        "--verify",
    )
    assert "is damaged: its CRC-32 is" in said
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_validation_documents_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "source", make_texts(10), "jsonl")
    run(str(source), "--output", str(tmp_path / "out"), "--tokenizer", "byte", "--val-fraction", "1e-9")
    assert "No document fell to validation: raise --val-fraction" in capsys.readouterr().out


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "source", make_texts(), "parquet")
    run(str(source), "--output", str(tmp_path / "out"), "--tokenizer", "byte", "--dry-run")
    printed = capsys.readouterr().out
    assert f"files      3, from {source / '000.parquet'} to {source / '002.parquet'}" in printed
    assert "tokenizer  byte: 256 ids; 0 ends a document" in printed
    for line in ("source     0.1 MB in 1", "tokens     about ", "disk       about 0.000 GB; ", "(not begun)"):
        assert line in printed
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_all_wrong_arguments_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        main([
            "prepare", str(tmp_path / "absent"), "s3://bucket/x", "--output", str(tmp_path / "file" / "out"),
            "--tokenizer", "./absent.json", "--vocab-size", "300", "--val-fraction", "1.5", "--num-workers", "-1",
            "--piece-mb", "0", "--max-mb", "-3", "--text-key", "",
        ])  # fmt: skip
    said = capsys.readouterr().err
    for part in (
        f"- {tmp_path / 'absent'}: there is no such file or folder",
        "- s3://bucket/x: is no place that can be read from",
        f"--output {tmp_path / 'file' / 'out'}: {tmp_path / 'file'} is no folder",
        "--tokenizer ./absent.json: there is no such file; give byte, bpe, a tokenizer.json",
        "--vocab-size 300: is for --tokenizer bpe",
        "--val-fraction 1.5: must be at least 0 and below 1",
        "--num-workers -1",
        "--piece-mb 0.0: must be above 0",
        "--max-mb -3.0: must be above 0",
        "--text-key is empty",
    ):
        assert part in said
    for output in (".", "", "..", "/"):
        assert "name a folder that is to be made" in refused(capsys, "x", "--output", output, "--tokenizer", "byte")
    for source in ("hf://gpt2", "hf://datasets/squad", "hf://datasets/a/"):
        said = refused(capsys, source, "--output", "o", "--tokenizer", "byte")
        assert f"{source}: is no place of a dataset; give hf://datasets/OWNER/NAME" in said
    said = refused(capsys, "x", "--output", "o", "--tokenizer", "bpe")
    assert "--vocab-size None: --tokenizer bpe needs at least 257" in said
    assert "--end-of-text" in refused(capsys, "x", "--output", "o", "--tokenizer", "byte", "--end-of-text", "<e>")


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_asyncpp.optional_packages.find_spec", lambda name: None)
    with pytest.raises(DataError) as caught:
        prepare(request("hf://datasets/a/b", tmp_path / "out", tokenizer="gpt2"))
    assert str(caught.value) == (
        "asyncpp prepare needs `huggingface_hub` and `pyarrow` and `tokenizers`, not installed here:"
        ' pip install "lightning-asyncpp[prepare]"'
    )


def test_sources_that_hold_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.jsonl").touch()
    write(tmp_path / "both", make_texts(5), "jsonl")
    write(tmp_path / "both", make_texts(5), "parquet")
    for source, message in (
        (tmp_path / "text", "holds no file that ends in .parquet, .jsonl"),
        (tmp_path / "text" / "a.txt", "holds no file that ends in"),
        (tmp_path / "*.parquet", "holds no file that ends in"),
        (tmp_path / "empty", "a.jsonl has no content"),
        (tmp_path / "both", r"holds parquet and JSON lines, maybe the same documents twice; give a glob"),
    ):
        with pytest.raises(DataError, match=message):
            prepare(request(source, tmp_path / "out"))
    prepare(request(tmp_path / "both" / "*.parquet", tmp_path / "out", val_fraction=0.0))


def test_folders_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be left out in silence."""
    write(tmp_path / "text", make_texts(5), "jsonl")
    write(tmp_path / "text" / "private", make_texts(5), "jsonl")
    refusing(monkeypatch, os, "scandir", tmp_path / "text" / "private")
    with pytest.raises(DataError, match=r"text cannot be read \(Permission denied: .*private\); let this user read it"):
        prepare(request(tmp_path / "text", tmp_path / "out"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text"\n', r"a\.jsonl, byte 14: no valid JSON"),
        ("a.jsonl", b'{"text": "a"}\n["b"]\n', r"byte 14: holds list and no object"),
        ("a.jsonl", b'{"content": "a", "id": 1}\n', r"has no field 'text'; give --text-key, one of content, id"),
        ("a.jsonl", b'{"text": 3}\n', r"field 'text' holds int and no text"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"byte 0: no valid JSON"),
        ("a.jsonl", b'{"text": "a"}\n' + b"[" * 10**5, r"byte 14: no valid JSON \((maximum recursion|Stack overflow)"),
        ("a.jsonl", b'{"text": "a\\u0000b"}\n', r"a document holds byte 0, which ends documents; choose another"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n{\n', mtime=0), r"a\.jsonl\.gz, line 2: no valid JSON"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9], r"after line 99: cut off or damaged"),
        ("a.jsonl.gz", b'{"text": "a"}\n', r"after line 0: cut off or damaged \(Not a gzipped file"),
        ("a.jsonl.zst", pa.Codec("zstd").compress(b'{"text": "a"}\n').to_pybytes()[:-1], r"cut off or damaged"),
        ("a.parquet", b'{"text": "a"}\n', r"a\.parquet is no parquet file"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(request(tmp_path / name, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def parquet(texts: list[bytes], path: Path) -> None:
    """Write a column of "text" in groups of 100 rows, whatever its bytes are."""
    offsets = pa.py_buffer(np.cumsum([0, *map(len, texts)], dtype=np.int32))
    column = pa.Array.from_buffers(pa.string(), len(texts), [None, offsets, pa.py_buffer(b"".join(texts))])
    pq.write_table(pa.table({"text": column}), path, row_group_size=100, compression="none", use_dictionary=False)


def test_damaged_parquet_files_are_named(tmp_path: Path) -> None:
    texts = [f"text {index} ".encode() * 20 for index in range(300)]
    parquet([*texts[:250], b"\xff\xfe", *texts[250:]], tmp_path / "encoding.parquet")
    message = r"encoding\.parquet, row groups 2 to 2, after row 0 of them: damaged, or no UTF-8 text"
    with pytest.raises(DataError, match=message):
        prepare(request(tmp_path, tmp_path / "out", piece_mb=0.01))
    parquet(texts, tmp_path / "encoding.parquet")
    whole = (tmp_path / "encoding.parquet").read_bytes()
    for name, begin, end in (("page", 4, 40), ("footer", len(whole) - 200, len(whole) - 20)):
        damaged = whole[:begin] + bytes(byte ^ 0x5A for byte in whole[begin:end]) + whole[end:]
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.parquet").write_bytes(damaged)
    for name, message in (("page", "after row 0 of them: damaged"), ("footer", "is no parquet file")):
        with pytest.raises(DataError, match=rf"a\.parquet.*{message}.*copy (it|the file) again"):
            prepare(request(tmp_path / name, tmp_path / f"{name}-out"))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_every_kind_of_text_column_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    try:
        pq.write_table(pa.table({"text": pa.array(["a", None, "bc"], kind)}), tmp_path / "a.parquet")
    except pa.ArrowNotImplementedError as error:
        pytest.skip(f"this pyarrow writes no such file: {error}")
    record = prepare(request(tmp_path, tmp_path / "out", val_fraction=0.0))
    assert record is not None
    assert (record.documents, record.empty, record.train_tokens) == (2, 1, 5)


def test_columns_that_are_not_there_or_hold_no_text(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pq.write_table(pa.table({"content": ["x"], "score": [1]}), tmp_path / f"{name}.parquet")
    with pytest.raises(DataError) as caught:
        prepare(request(tmp_path, tmp_path / "out"))
    assert str(caught.value).splitlines() == [
        f"{tmp_path / name}.parquet has no column 'text'; give --text-key, one of content, score" for name in ("a", "b")
    ]
    with pytest.raises(DataError, match="column 'score' holds int64 and no text"):
        prepare(request(tmp_path, tmp_path / "out", text_key="score"))
    assert prepare(request(tmp_path, tmp_path / "out", text_key="content", val_fraction=0.0)) is not None


def test_a_failure_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source", make_texts(), "jsonl")
    arguments = (str(source), "--output", str(tmp_path / "out"), "--tokenizer", "byte")
    done = []

    def full(*_: object) -> None:
        done.append(1)
        if len(done) == 3:
            raise OSError(28, "No space left on device")
        original(*_)

    with monkeypatch.context() as patch:
        original = piece_module._publish  # type: ignore[attr-defined]
        patch.setattr(piece_module, "_publish", full)
        said = refused(capsys, *arguments)
    assert "error: [Errno 28] No space left on device" in said
    assert f"What is done is kept in {tmp_path / 'out.partial'}; the same command goes on from there." in said
    run(*arguments)


def test_everything_kept_for_validation_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "source", ["one"], "jsonl", files=1)
    with pytest.raises(DataError, match="no document is left to train on; lower --val-fraction"):
        prepare(request(source, tmp_path / "out", val_fraction=0.999999))
    assert json.loads((source / "000.jsonl").read_text())["text"] == "one"

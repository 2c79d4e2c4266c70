"""What `asyncpp prepare` writes: the same tokens from every format, each document once, with its end."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_asyncpp.data import BPETokenizer, ByteTokenizer, DataError
from lightning_asyncpp.data import token_dataset as token_dataset_module
from lightning_asyncpp.data.source import load_tokenizer
from lightning_asyncpp.data.token_dataset import read_metadata, verify_checksums
from lightning_asyncpp.tools.prepare import pieces as piece_module
from lightning_asyncpp.tools.prepare.assemble import read_origin
from lightning_asyncpp.tools.prepare.pieces import is_validation
from lightning_asyncpp.tools.prepare.preparation import estimate, prepare
from lightning_asyncpp.tools.prepare.source_files import SourceFile, Span, find_files, read_documents
from lightning_asyncpp.tools.prepare.work_plan import make_plan
from tests.tools.prepare.corpus import content, expected, make_texts, request, stored, write

KINDS = ("parquet", "jsonl", "jsonl.gz", "jsonl.zst")


@pytest.mark.parametrize(
    ("piece_mb", "kind"),
    [
        (0.0005, "jsonl.gz"),
        *((0.01, kind) for kind in KINDS),
        (100.0, "parquet"),
        *(
            pytest.param(piece_mb, kind, marks=pytest.mark.slow)
            for piece_mb, kinds in ((0.0005, ("parquet", "jsonl", "jsonl.zst")), (100.0, KINDS[1:]))
            for kind in kinds
        ),
    ],
)
def test_every_document_once_with_its_end(tmp_path: Path, kind: str, piece_mb: float) -> None:
    texts: list[str | None] = [*make_texts(100), "", None, "last"]
    source = write(tmp_path / "source", texts, kind)
    record = prepare(request(source, tmp_path / "out", piece_mb=piece_mb))
    assert stored(tmp_path / "out") == expected(texts, ByteTokenizer(), 0.1)
    metadata = read_metadata(tmp_path / "out")
    train, val = (len(split) for split in expected(texts, ByteTokenizer(), 0.1))
    assert record is not None
    assert (record.train_tokens, record.val_tokens) == (train, val) == (metadata.train_tokens, metadata.val_tokens)
    assert (record.documents, record.empty) == (101, 2)
    assert record.val_documents == sum(is_validation(text, 0.1) for text in texts if text)
    assert record.text_bytes == sum(len(text.encode()) for text in texts if text)
    assert record.size == make_plan(request(source, tmp_path), find_files([str(source)])).size
    verify_checksums(tmp_path / "out", metadata)
    assert not (tmp_path / "out.partial").exists()


def test_several_chunks_per_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (token_dataset_module, piece_module):
        monkeypatch.setattr(module, "CHUNK_BYTES", 4_000)
    monkeypatch.setattr("lightning_asyncpp.tools.prepare.source_files._ROWS", 3)
    texts = make_texts(100)
    prepare(request(write(tmp_path / "source", texts, "jsonl"), tmp_path / "out"))
    assert (tmp_path / "out" / "train" / "chunk-1-2.bin").exists()
    assert stored(tmp_path / "out") == expected(texts, ByteTokenizer(), 0.1)


def test_trained_and_given_vocabularies(tmp_path: Path) -> None:
    texts = make_texts(100)
    source = write(tmp_path / "source", texts, "parquet")
    prepare(request(source, tmp_path / "out", tokenizer="bpe", vocab_size=300))
    tokenizer = BPETokenizer.load(tmp_path / "out" / "tokenizer.json")
    assert read_metadata(tmp_path / "out").vocab_size == tokenizer.vocab_size == 300
    assert stored(tmp_path / "out") == expected(texts, tokenizer, 0.1)
    assert max(map(max, stored(tmp_path / "out"))) > 255
    for given in (tmp_path / "out" / "tokenizer.json", tmp_path / "out"):
        output = tmp_path / f"given-{given.name}"
        prepare(request(source, output, tokenizer=str(given)))
        assert stored(output) == stored(tmp_path / "out")
    with pytest.raises(DataError, match=r"has no token '<end>'; name the one that ends a document with --end-of-text"):
        prepare(request(source, tmp_path / "other", tokenizer=str(tmp_path / "out"), end_of_text="<end>"))
    prepare(request(source, tmp_path / "unusual", tokenizer=str(tmp_path / "out"), end_of_text="!"))
    exclamation = BPETokenizer.load(tmp_path / "out" / "tokenizer.json", end_of_text="!")
    assert stored(tmp_path / "unusual") == expected(texts, exclamation, 0.1)
    origin = read_origin(tmp_path / "unusual")
    assert origin is not None
    assert origin.request["end_of_text"] == "!"
    assert load_tokenizer(str(tmp_path / "unusual")).end_of_document == exclamation.end_of_document
    written = json.loads((tmp_path / "unusual" / "prepared.json").read_text())
    assert written["end_of_document"] == exclamation.end_of_document != tokenizer.end_of_document


def test_a_vocabulary_is_not_trained_on_validation_documents(tmp_path: Path) -> None:
    texts = make_texts(60)
    only = next(text for text in (f"{'ŧ' * 50} {i}" for i in range(1000)) if is_validation(text, 0.1))
    prepare(request(write(tmp_path / "s", [*texts, only], "jsonl"), tmp_path / "out", tokenizer="bpe", vocab_size=400))
    tokenizer = BPETokenizer.load(tmp_path / "out" / "tokenizer.json")
    assert len(tokenizer.encode("ŧŧŧŧ")) == 8


def test_text_that_spells_a_special_token_ends_no_document(tmp_path: Path) -> None:
    texts = [*make_texts(20), "one <|endoftext|> two"]
    source = write(tmp_path / "source", texts, "jsonl")
    prepare(request(source, tmp_path / "out", tokenizer="bpe", vocab_size=280, val_fraction=0.0))
    train, val = stored(tmp_path / "out")
    assert train.count(0) == 21
    assert val == []
    assert read_metadata(tmp_path / "out").val_tokens == 0


def test_the_split_goes_by_text_alone(tmp_path: Path) -> None:
    texts = make_texts(2000)
    share = sum(is_validation(text, 0.2) for text in texts) / 2000
    assert 0.17 < share < 0.23
    assert all(is_validation(text, 0.3) for text in texts if is_validation(text, 0.2))
    assert not any(is_validation(text, 0.0) for text in texts)
    prepare(request(write(tmp_path / "a", texts[:300], "parquet"), tmp_path / "one"))
    prepare(request(write(tmp_path / "b", texts[299::-1], "jsonl", files=1), tmp_path / "two"))
    for one, two in zip(stored(tmp_path / "one"), stored(tmp_path / "two")):
        documents = [bytes(split).split(b"\0") for split in (one, two)]
        assert sorted(documents[0]) == sorted(documents[1])


def test_neither_processes_nor_their_number_change_a_bit(tmp_path: Path) -> None:
    source = write(tmp_path / "source", make_texts(), "parquet")
    prepare(request(source, tmp_path / "one"))
    prepare(request(source, tmp_path / "two", num_workers=2))
    assert content(tmp_path / "one") == content(tmp_path / "two")


@pytest.mark.slow
def test_a_problem_of_one_process_ends_the_others_however_much_they_have_to_tell(tmp_path: Path) -> None:
    """More than fits a pipe."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "0.jsonl").write_text("{\n")
    (source / "1.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 600_000))
    with pytest.raises(DataError, match=r"0\.jsonl, byte 0: no valid JSON"):
        prepare(request(source, tmp_path / "out", num_workers=2, piece_mb=2e-6))
    assert not (tmp_path / "out").exists()


def test_long_documents_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    texts = [f"{index} " + "long " * 200_000 for index in range(12)]
    source = write(tmp_path, texts, "parquet", files=1)
    (file,) = find_files([str(source)])
    plan = make_plan(request(source, tmp_path, piece_mb=100.0), [file])
    parts = [part.texts for part in read_documents(file, plan.pieces[0][0], "text")]
    assert [text for part in parts for text in part] == texts
    assert max(map(len, parts)) <= 5


def test_lines_are_cut_where_they_begin(tmp_path: Path) -> None:
    texts = ["a" * length for length in (1, 40, 2, 3, 90, 1)]
    source = write(tmp_path, texts, "jsonl", files=1)
    (file,) = find_files([str(source)])
    for step in (1, 2, 7, 64, 1000):
        spans = [Span(0, start, min(start + step, file.size), step) for start in range(0, file.size, step)]
        read = [text for span in spans for part in read_documents(file, span, "text") for text in part.texts]
        assert read == texts
        sizes = [sum(part.size for part in read_documents(file, span, "text")) for span in spans]
        assert sizes == [span.size for span in spans]


def test_half_characters_become_the_replacement_character(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a\\ud83d b"}\n\n{"text": "\\ud83d\\ude42"}\n')
    (file,) = find_files([str(tmp_path)])
    read = [part.texts for part in read_documents(file, Span(0, 0, file.size, file.size), "text")]
    assert read == [["a\ufffd b", "🙂"]]


def test_part_of_a_source(tmp_path: Path) -> None:
    texts = make_texts()
    source = write(tmp_path / "source", texts, "jsonl")
    prepare(request(source, tmp_path / "all"))
    prepare(request(source, tmp_path / "part", max_mb=0.02))
    whole, part = stored(tmp_path / "all")[0], stored(tmp_path / "part")[0]
    assert 15_000 < len(part) < 25_000 < len(whole)
    assert whole[: len(part)] == part


def test_part_of_many_files_is_found_without_looking_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "source", make_texts(), "parquet", files=12)
    for size in (0.001, 0.02, 0.03, 10.0):
        asked = request(source, tmp_path / "out", max_mb=size)
        plan = make_plan(asked, find_files(asked.sources))
        with monkeypatch.context() as patch:
            patch.setattr("lightning_asyncpp.tools.prepare.work_plan._FILES_AT_A_TIME", 1)
            assert make_plan(asked, find_files(asked.sources)) == plan
            (tmp_path / "source" / "011.parquet").rename(tmp_path / "kept")
            (tmp_path / "source" / "011.parquet").write_bytes(b"no parquet")
            if size < 1:
                assert make_plan(asked, find_files(asked.sources)).pieces == plan.pieces
            else:
                with pytest.raises(DataError, match="is no parquet file"):
                    make_plan(asked, find_files(asked.sources))
            (tmp_path / "kept").rename(tmp_path / "source" / "011.parquet")


def test_a_second_run_has_nothing_to_do_and_other_arguments_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "source", make_texts(40), "jsonl")
    prepare(request(source, tmp_path / "out"))
    assert prepare(request(source, tmp_path / "out", num_workers=3)) is None
    with pytest.raises(DataError, match=r"prepared with other arguments \(val_fraction: 0.1, and now 0.2\)"):
        prepare(request(source, tmp_path / "out", val_fraction=0.2))
    (source / "000.jsonl").touch()
    assert prepare(request(source, tmp_path / "out")) is None
    (source / "003.jsonl").write_text('{"text": "new"}\n')
    with pytest.raises(
        DataError,
        match=rf"these files changed, came or went since it was prepared: {source / '003.jsonl'}; delete it, or na",
    ):
        prepare(request(source, tmp_path / "out"))
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match="exists already; delete it, or name another output"):
        prepare(request(source, tmp_path / "mine"))


def test_sources_that_overlap_are_read_once(tmp_path: Path) -> None:
    texts = make_texts(60)
    source = write(tmp_path / "source", texts, "jsonl")
    several = replace(request(source, tmp_path / "out"), sources=(str(source / "*1.jsonl"), str(source)))
    prepare(several)
    assert stored(tmp_path / "out") == expected([*texts[20:40], *texts[:20], *texts[40:]], ByteTokenizer(), 0.1)


def test_an_estimate_is_near_and_writes_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "source", make_texts(), "parquet")
    judged = estimate(request(source, tmp_path / "out"))
    tokens = sum(map(len, expected(make_texts(), ByteTokenizer(), 0.1)))
    assert tokens * 0.8 < judged.tokens < tokens * 1.2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_files_know_their_format() -> None:
    assert [SourceFile(f"x.{kind}", 1).is_parquet for kind in KINDS] == [True, False, False, False]
    assert [SourceFile(f"x.{kind}", 1).is_compressed for kind in KINDS] == [False, False, True, True]


def test_what_was_read_is_written_down(tmp_path: Path) -> None:
    source = write(tmp_path / "source", make_texts(40), "jsonl")
    prepare(request(source, tmp_path / "out"))
    origin = json.loads((tmp_path / "out" / "prepared.json").read_text())
    paths = [source / f"00{index}.jsonl" for index in range(3)]
    assert origin["files"] == [{"url": str(path), "size": path.stat().st_size} for path in paths]
    assert (origin["documents"], origin["vocab_size"], origin["end_of_document"]) == (40, 256, 0)

"""Sources and tokenizers of the hub, with its real client and a server on this machine that answers like it."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp.data import BPETokenizer, ByteTokenizer, DataError
from lightning_asyncpp.data.source import load_tokenizer
from lightning_asyncpp.tools.prepare import pieces as piece_module
from lightning_asyncpp.tools.prepare import preparation as run_module
from lightning_asyncpp.tools.prepare.preparation import estimate, prepare
from lightning_asyncpp.tools.prepare.source_files import find_files
from lightning_asyncpp.tools.prepare.work_plan import Request, make_plan
from tests.tools.prepare.corpus import content, expected, make_texts, request, stored, write
from tests.tools.prepare.hub import BROKEN_OFF, SHA, StandIn, serving

pytest.importorskip("huggingface_hub")

SAMPLE = "hf://datasets/Owner/corpus/sample/10BT"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A hub with a corpus of three parquet files, and a tokenizer."""
    import huggingface_hub.constants

    root = tmp_path / "hub"
    write(root / "datasets" / "Owner" / "corpus" / "sample" / "10BT", make_texts(120), "parquet")
    write(root / "datasets" / "Owner" / "corpus" / "other", make_texts(60), "jsonl")
    (root / "models" / "Owner" / "small").mkdir(parents=True)
    BPETokenizer.train(make_texts(50), 290).save(root / "models" / "Owner" / "small")
    (root / "models" / "Owner" / "without").mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with serving(root) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the port of `discard`, which nobody serves


def test_files_are_found_at_one_commit(hub: StandIn) -> None:
    files = find_files([SAMPLE])
    assert [file.url for file in files] == [
        f"hf://datasets/Owner/corpus@{SHA}/sample/10BT/00{index}.parquet" for index in range(3)
    ]
    folder = hub.root / "datasets" / "Owner" / "corpus" / "sample" / "10BT"
    assert [file.size for file in files] == [path.stat().st_size for path in sorted(folder.iterdir())]
    assert find_files([f"{SAMPLE}/*1.parquet"]) == find_files([f"{SAMPLE}/001.parquet"]) == files[1:2]
    assert find_files(["hf://datasets/Owner/corpus@main/sample"]) == files


@pytest.mark.parametrize(("folder", "count"), [("sample/10BT", 120), pytest.param("other", 60, marks=pytest.mark.slow)])
def test_the_hub_gives_what_its_files_give(hub: StandIn, tmp_path: Path, folder: str, count: int) -> None:
    prepare(request(f"hf://datasets/Owner/corpus/{folder}", tmp_path / "out"))
    assert stored(tmp_path / "out") == expected(make_texts(count), ByteTokenizer(), 0.1)
    prepare(request(hub.root / "datasets" / "Owner" / "corpus" / folder, tmp_path / "local"))
    assert stored(tmp_path / "local") == stored(tmp_path / "out")
    assert all(wanted.startswith("bytes=") for _, wanted in hub.ranges)  # ranges, and never a file


def test_an_interrupted_run_goes_on_with_the_files_of_its_commit(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(SAMPLE, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("lightning_asyncpp.tools.prepare.preparation.assemble", lambda *_: None)
        prepare(asked)
    monkeypatch.setattr("lightning_asyncpp.tools.prepare.preparation.find_files", lambda _: pytest.fail("listed again"))
    prepare(asked)
    assert stored(tmp_path / "out") == expected(make_texts(120), ByteTokenizer(), 0.1)


def begun(asked: Request) -> None:
    """Plan a preparation, and interrupt it before its first piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "_write_missing", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(asked)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Indices of the pieces that were tried."""
    tried: list[int] = []
    original = piece_module._write

    def counted(work: Any, index: int, *rest: Any) -> Any:
        tried.append(index)
        return original(work, index, *rest)

    monkeypatch.setattr(piece_module, "_write", counted)
    return tried


@pytest.mark.parametrize("failure", [503, pytest.param(429, marks=pytest.mark.slow), BROKEN_OFF])
def test_hiccups_of_the_network_are_got_over(hub: StandIn, tmp_path: Path, attempts: list[int], failure: int) -> None:
    """More of them in a row than the hub's own client puts up with."""
    prepare(request(SAMPLE, tmp_path / "steady"))
    pieces = len(attempts)
    begun(request(SAMPLE, tmp_path / "unsteady"))
    hub.failures = itertools.chain([None], [failure] * 9, [None, None], [failure] * 7)
    prepare(request(SAMPLE, tmp_path / "unsteady"))
    assert next(hub.failures, None) is None
    assert len(attempts) >= 2 * pieces + 2
    assert content(tmp_path / "unsteady") == content(tmp_path / "steady")


def test_a_hub_that_stays_away_ends_the_run_which_goes_on_later(
    hub: StandIn, tmp_path: Path, attempts: list[int]
) -> None:
    asked = request(SAMPLE, tmp_path / "out")
    begun(asked)
    hub.failures = itertools.repeat(503)
    with pytest.raises(
        DataError, match=r"corpus@0123.*cannot be reached.*503.*tried 5 times, and goes on where it was"
    ):
        prepare(asked)
    assert attempts == [0] * 5
    hub.failures = iter(())
    prepare(asked)
    assert stored(tmp_path / "out") == expected(make_texts(120), ByteTokenizer(), 0.1)


def test_what_cannot_pass_is_not_tried_again(
    hub: StandIn, tmp_path: Path, attempts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(SAMPLE, tmp_path / "out")
    begun(asked)
    with monkeypatch.context() as patch:
        patch.setattr(
            piece_module, "_publish", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        with pytest.raises(OSError, match="No space left on device"):
            prepare(asked)
    assert attempts == [0]
    (hub.root / "datasets" / "Owner" / "corpus" / "sample" / "10BT" / "000.parquet").unlink()
    with pytest.raises(DataError, match=r"000\.parquet: the hub has no such repository, revision or file"):
        prepare(asked)
    assert attempts == [0, 0]


def test_an_interruption_is_heard_while_the_hub_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = []
    monkeypatch.setattr("time.sleep", seconds.append)

    def stopped(_: object) -> None:
        if len(seconds) == 3:
            raise piece_module.Stopped

    with pytest.raises(piece_module.Stopped):
        piece_module._wait(256, stopped)
    assert seconds == [1.0] * 3


@pytest.mark.parametrize("tokenizer", [pytest.param("byte", marks=pytest.mark.slow), "bpe"])
def test_estimates_and_vocabularies_say_when_the_hub_fails(hub: StandIn, tmp_path: Path, tokenizer: str) -> None:
    asked = request(SAMPLE, tmp_path / "out", tokenizer=tokenizer, vocab_size=300 if tokenizer == "bpe" else None)
    make_plan(asked, find_files(asked.sources))
    hub.failures = itertools.chain([None] * len(hub.ranges), itertools.repeat(429))
    with pytest.raises(
        DataError, match=r"was asked too often .*429.*run the same command again in some minutes, or set"
    ):
        estimate(asked)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf://datasets/Owner/absent", "the hub has no such repository, revision or file"),
        ("hf://datasets/Owner/corpus/absent", "holds no file that ends in .parquet, .jsonl"),
        ("hf://datasets/Owner/corpus", "holds parquet and JSON lines"),
    ],
)
def test_what_the_hub_does_not_have(hub: StandIn, source: str, message: str) -> None:
    with pytest.raises(DataError, match=f"{source}: {message}"):
        find_files([source])


def test_no_internet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere(monkeypatch)
    with pytest.raises(DataError) as caught:
        prepare(request("hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT", tmp_path / "out"))
    assert "the Hugging Face Hub (http://127.0.0.1:9) cannot be reached (" in str(caught.value)
    assert (
        "run `hf download HuggingFaceFW/fineweb-edu --repo-type dataset --include 'sample/10BT/*' --local-dir DIR` on "
        "a machine that has it, copy DIR here, and give it as the source"
    ) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_tokenizers_of_the_hub(hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = make_texts(60)
    source = write(tmp_path / "source", texts, "jsonl")
    prepare(request(source, tmp_path / "out", tokenizer="Owner/small"))
    tokenizer = BPETokenizer.load(hub.root / "models" / "Owner" / "small" / "tokenizer.json")
    assert stored(tmp_path / "out") == expected(texts, tokenizer, 0.1)
    for name, message in (("Owner/absent", "no such repository"), ("Owner/without", "no such repository, rev.* file")):
        with pytest.raises(DataError, match=rf"tokenizer='{name}', which is no file here: the hub has {message}"):
            load_tokenizer(name)
    with pytest.raises(DataError, match="tokenizer='a--b', which is no file here: is no name that the hub could have"):
        load_tokenizer("a--b")
    nowhere(monkeypatch)
    assert load_tokenizer("Owner/small").fingerprint == tokenizer.fingerprint  # from the cache
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(DataError) as caught:
        load_tokenizer("Owner/small")
    assert "cannot be reached" in str(caught.value)
    assert "run `hf download Owner/small tokenizer.json --local-dir DIR` on a machine that has it" in str(caught.value)

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_asyncpp.data import DataError, TextDataModule
from lightning_asyncpp.data.corpus import find_text_files, split
from lightning_asyncpp.data.token_dataset import write_token_dataset


def module(folder: Path, **arguments: Any) -> TextDataModule:
    given = {"context_length": 32, "batch_size": 4, "val_fraction": 0.2, "cache_dir": str(folder.parent / "cache")}
    return TextDataModule(**{"source": str(folder), **given, **arguments})


def ready(folder: Path, **arguments: Any) -> TextDataModule:
    data = module(folder, **arguments)
    data.prepare_data()
    data.setup()
    return data


def prepared_folder(folder: Path) -> Path:
    return next((folder.parent / "cache").iterdir())


def test_text_comes_back_split_by_file(text_folder: Path) -> None:
    data = ready(text_folder, shuffle=False, patterns="**/*.txt")
    train, validation = split(find_text_files(text_folder), 0.2)
    for files, loader in ((train, data.train_dataloader()), (validation, data.val_dataloader())):
        batches = list(loader)
        assert len(batches) == len(loader) > 3
        assert all(batch.dtype == torch.int64 and batch.shape[1] == 33 for batch in batches)
        read = bytes(torch.cat(batches).flatten().tolist())
        written = b"".join(file.path.read_bytes() + b"\0" for file in files)
        assert written.startswith(read)
        assert len(written) - len(read) < 4 * 33
    assert sum(len(batch) for batch in data.val_dataloader()) == len(written) // 33  # the incomplete batch is kept


def test_epochs_differ_and_repeat_with_the_seed(text_folder: Path) -> None:
    def epochs(seed: int) -> list[Any]:
        loader = ready(text_folder, seed=seed, batch_size=16).train_dataloader()
        return [torch.cat(list(loader)).tolist() for _ in range(2)]

    first, again, other = epochs(1), epochs(1), epochs(2)
    assert first == again
    assert first[0] not in (first[1], other[0])


def test_bpe_is_trained_on_the_training_files_and_kept(text_folder: Path) -> None:
    _, validation = split(find_text_files(text_folder), 0.2)
    validation[0].path.write_text("ŧŧŧŧŧŧŧŧ" * 200)
    data = ready(text_folder, tokenizer="bpe", vocab_size=400, context_length=8, batch_size=2)
    assert 257 < data.tokenizer.vocab_size <= 400
    batch = next(iter(data.train_dataloader()))
    assert int(batch.max()) < data.tokenizer.vocab_size
    assert "document" in data.tokenizer.decode(torch.cat(list(data.train_dataloader())).flatten())
    assert len(data.tokenizer.encode_batch(["ŧŧŧŧ"])[0]) == 8  # no merge was learned from validation text
    from_file = ready(text_folder, tokenizer=str(prepared_folder(text_folder) / "tokenizer.json"), context_length=8)
    assert from_file.tokenizer.vocab_size == data.tokenizer.vocab_size


def test_the_contents_of_the_text_name_the_prepared_folder(text_folder: Path) -> None:
    """Times and paths do not matter; other text gets another folder, even if names, sizes and times are equal."""
    ready(text_folder)
    first = prepared_folder(text_folder)
    before = (first / "metadata.json").stat().st_mtime_ns
    other = text_folder.parent / "elsewhere" / text_folder.name
    shutil.copytree(text_folder, other)
    cache = str(text_folder.parent / "cache")
    assert ready(other, cache_dir=cache).tokens == ready(text_folder).tokens
    for path in text_folder.iterdir():
        os.utime(path, ns=(0, 0))
        copy = other / path.name
        copy.write_text(copy.read_text().replace("document", "treatise"))
        os.utime(copy, ns=(0, 0))
    ready(text_folder)
    assert list(Path(cache).iterdir()) == [first], "touched, and the same"
    assert (first / "metadata.json").stat().st_mtime_ns == before
    read = [bytes(ready(f, cache_dir=cache, shuffle=False).train_dataloader().dataset[0]) for f in (text_folder, other)]
    assert b"document" in read[0]
    assert b"treatise" in read[1]


def test_a_crash_leaves_nothing(text_folder: Path) -> None:
    (text_folder / "broken.txt").write_bytes(b"text" * 2000 + b"\xff")
    with pytest.raises(DataError, match=r"broken\.txt"):
        module(text_folder).prepare_data()
    assert list((text_folder.parent / "cache").iterdir()) == []


def test_the_slower_of_two_processes_keeps_the_other_folder(text_folder: Path) -> None:
    data, folder = ready(text_folder), prepared_folder(text_folder)
    content = (folder / "metadata.json").read_bytes()
    write_token_dataset(folder, *split(find_text_files(text_folder), 0.5), data.tokenizer)
    assert (folder / "metadata.json").read_bytes() == content
    assert list(folder.parent.iterdir()) == [folder]


def test_prepared_and_raw_token_datasets_as_source(text_folder: Path) -> None:
    expected = torch.cat(list(ready(text_folder).train_dataloader()))
    folder = prepared_folder(text_folder)
    for tokens, places in ((folder / "train", {"tokenizer": "bpe"}), (text_folder, {"val_source": str(folder)})):
        with pytest.raises(DataError, match=r"^tokenizer='bpe' is trained on text|^val_source=.* is for a source of"):
            ready(tokens, vocab_size=300, **places)
    prepared, *others = (
        ready(folder),
        ready(folder, val_source=f"~/{os.path.relpath(folder / 'val', Path.home())}"),
        ready(folder / "train", val_source=str(folder), vocab_size=256),
        ready(text_folder, source=f"local:{folder / 'train'}", val_source=f"local:{folder / 'val'}"),
    )
    for data in (prepared, *others):
        assert torch.equal(torch.cat(list(data.train_dataloader())), expected)
        assert len(data.val_dataloader()) == len(prepared.val_dataloader())
    assert prepared.tokenizer.vocab_size == 256


def test_text_shorter_than_a_sequence_or_a_batch(text_folder: Path) -> None:
    with pytest.raises(DataError, match=r"holds 0 sequences of context_length \+ 1 = 1000001 tokens"):
        ready(text_folder, context_length=1_000_000)
    with pytest.raises(DataError, match="at least 100000 are needed"):
        ready(text_folder, batch_size=100_000).train_dataloader()


@pytest.mark.parametrize(("name", "least"), [("vocab_size", 256), ("context_length", 32)])
def test_data_that_the_model_is_too_small_for(text_folder: Path, name: str, least: int) -> None:
    data = ready(text_folder)
    model = SimpleNamespace(config=SimpleNamespace(**{name: least - 1}))
    data.trainer = SimpleNamespace(lightning_module=model, distributed_sampler_kwargs=None)  # type: ignore[assignment]
    with pytest.raises(DataError, match=f"{least - 1}.*model|model only {least - 1}"):
        data.setup()
    setattr(model.config, name, least)
    data.setup()


def test_a_damaged_cache_is_reported(text_folder: Path) -> None:
    ready(text_folder)
    folder = prepared_folder(text_folder)
    (folder / "train/index.json").write_text('{"chunks": [{}], "config": {"data_format": ["x"]}}')
    with pytest.raises(DataError, match=r"train is a litdata dataset of \['x'\]"):
        ready(text_folder)
    (folder / "metadata.json").write_text("{")
    with pytest.raises(DataError, match=r"metadata\.json"):
        ready(text_folder)


@pytest.mark.parametrize("place", ["", "local:"])
def test_a_chunk_outside_of_its_folder_is_neither_read_nor_written(text_folder: Path, place: str) -> None:
    ready(text_folder)
    train = prepared_folder(text_folder) / "train"
    index = json.loads((train / "index.json").read_text())
    (train / index["chunks"][0]["filename"]).rename(text_folder.parent / "outside.bin")
    index["chunks"][0]["filename"] = "../../../outside.bin"
    (train / "index.json").write_text(json.dumps(index))
    data = ready(text_folder, source=f"{place}{train}", vocab_size=256)
    with pytest.raises(DataError, match=r"names a chunk '\.\./\.\./\.\./outside\.bin' outside of its folder"):
        data.train_dataloader()
    assert not [path for path in text_folder.parent.rglob("outside.bin") if path.parent != text_folder.parent]


# -- which files are read, and how they are split ---------------------------------------------------------------------


def test_split_is_by_file_and_stable(text_folder: Path) -> None:
    files = find_text_files(text_folder)
    train, validation = map(set, split(files, 0.2))
    assert (train | validation, train & validation) == (set(files), set())
    assert 3 <= len(validation) <= 13
    (text_folder / "new.txt").write_text("one more")
    grown = split(find_text_files(text_folder), 0.2)
    assert train <= set(grown[0])
    assert validation <= set(grown[1])
    for fraction in (1e-9, 1 - 1e-9):
        assert [len(chosen) for chosen in split(files[:2], fraction)] == [1, 1]
    some = find_text_files(text_folder, max_bytes=15_000)
    assert 12_000 < sum(file.size for file in some) <= 15_000
    assert len(some) > 2 * len(split(some, 0.2)[1]) > 0


def test_order_depends_on_names_alone(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy")
    names = [file.name for file in find_text_files(text_folder)]
    for name in reversed(names):
        (copy / name).write_text("other text")
    assert [file.name for file in find_text_files(copy)] == names != sorted(names)


def test_files_that_are_left_out_or_no_text(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    for name in (".git/notes.txt", ".hidden.txt", "image.png", "kept.md"):
        (tmp_path / name).write_bytes("größe".encode("latin-1"))
    (file,) = find_text_files(tmp_path)
    with pytest.raises(DataError, match=r"kept\.md is not UTF-8 text \(byte 2"):
        file.read()


@pytest.mark.parametrize(("source", "place"), [("stdlib", "json/"), ("packages", "torch/nn/")])
def test_code_of_this_machine(source: str, place: str) -> None:
    files = find_text_files(source, ["json/*.py", "torch/nn/*.py"])
    assert all(file.name.startswith(place) and file.read() for file in files)
    assert files

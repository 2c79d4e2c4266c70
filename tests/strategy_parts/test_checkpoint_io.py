"""Ranks that read a checkpoint while a run replaces it: they read the same save of it, or say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_asyncpp.storage.names import StorageError
from lightning_asyncpp.storage.opened import opened
from lightning_asyncpp.strategy_parts import checkpoint_io as module
from lightning_asyncpp.strategy_parts.checkpoint_io import DurableCheckpointIO, Ranks, held_whole, ranks_of
from tests.storage.saves import SAVES
from tests.storage.test_storage_damage import flip

FORMS = ("full", "sharded")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSES", (0.0,) * len(module._PAUSES))


class Other:
    """A rank beside this one, which opens the path later; before that it is done what ``meanwhile`` does."""

    def __init__(self, path: Path, meanwhile: Callable[[int], None]) -> None:
        self.path, self.meanwhile = path, meanwhile
        self.said: list[str] = []
        self.errors: list[Exception | None] = []

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.exchange, self.agree)

    def exchange(self, text: str) -> list[str]:
        self.meanwhile(len(self.said))
        with opened(self.path) as checkpoint:
            self.said.append(checkpoint.identity)
        return [text, self.said[-1]]

    def agree(self, error: Exception | None) -> None:
        self.errors.append(error)
        if error is not None:
            raise error


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_that_comes_late_has_all_begin_anew(form: str, tmp_path: Path) -> None:
    path, files = tmp_path / "last.ckpt", DurableCheckpointIO()
    SAVES[form](str(path), 1)
    other = Other(path, lambda attempt: SAVES[form](str(path), 2) if attempt == 0 else None)
    with held_whole(path, files, other.ranks):
        SAVES[form](str(path), 3)
        found = files.load_checkpoint(path)
    assert found["step"] == 2
    assert len(other.said) == 2
    assert files.load_checkpoint(path)["step"] == 3  # nothing is held any more


@pytest.mark.parametrize("form", FORMS)
def test_ranks_that_never_read_the_same_save(form: str, tmp_path: Path) -> None:
    path, files = tmp_path / "last.ckpt", DurableCheckpointIO()
    SAVES[form](str(path), 100)
    other = Other(path, lambda attempt: SAVES[form](str(path), attempt))
    with pytest.raises(StorageError) as caught:
        with held_whole(path, files, other.ranks):
            raise AssertionError("two saves are mixed")
    message = (
        f"the checkpoint {path} is being replaced by a run: ranks read different saves of it; copy it, or name one"
    )
    assert message in str(caught.value)
    assert len(other.said) == len(module._PAUSES)


@pytest.mark.parametrize("form", FORMS)
def test_what_was_compared_is_what_is_loaded(form: str, tmp_path: Path) -> None:
    """A damaged one that takes its name afterwards is not what comes."""
    path, files = tmp_path / "last.ckpt", DurableCheckpointIO()
    SAVES[form](str(path), 1)
    with held_whole(str(path), files, ranks_of(None)):
        SAVES[form](str(path), 2)
        largest = max((p for p in (path, *path.rglob("*")) if p.is_file()), key=lambda part: part.stat().st_size)
        flip(largest, largest.stat().st_size // 2, 1)
        assert files.load_checkpoint(str(path))["step"] == 1
    with pytest.raises(StorageError, match="is damaged: its CRC-32 is"), held_whole(path, files, ranks_of(None)):
        raise AssertionError("a damaged one is read")


def test_a_rank_that_cannot_read_it_is_told_to_all(tmp_path: Path) -> None:
    path, files = tmp_path / "last.ckpt", DurableCheckpointIO()
    SAVES["full"](str(path), 1)

    def told(error: Exception | None) -> None:
        raise StorageError("rank 1: cannot") from error

    with pytest.raises(StorageError, match="rank 1: cannot"):
        with held_whole(path, files, Ranks(lambda text: [text, module._FAILED], told)):
            raise AssertionError("the other rank has failed")


@pytest.mark.parametrize("files", [DurableCheckpointIO(), TorchCheckpointIO()])
def test_what_is_not_looked_at(files: Any, tmp_path: Path) -> None:
    """What is not there, and what others read."""
    path = tmp_path / "last.ckpt"
    if not isinstance(files, DurableCheckpointIO):
        SAVES["full"](str(path), 1)
    with held_whole(path, files, Ranks(lambda text: [text, text], pytest.fail)):
        pass


def test_a_file_of_a_url_runs_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning would run what one of http holds."""
    asked = []
    monkeypatch.setattr(TorchCheckpointIO, "load_checkpoint", lambda self, *arguments: asked.append(arguments))
    files = DurableCheckpointIO()
    for weights_only in (None, True, False):
        files.load_checkpoint("memory://x.ckpt", weights_only=weights_only)
    assert [weights_only for *_, weights_only in asked] == [True, True, False]

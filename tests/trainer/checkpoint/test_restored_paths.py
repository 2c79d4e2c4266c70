"""A checkpoint names nothing to remove but checkpoints in the folder of the callback that goes on from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import tensor

from lightning_asyncpp.storage.names import is_inside
from lightning_asyncpp.strategy_parts.checkpoint_io import DurableCheckpointIO
from lightning_asyncpp.trainer.checkpoint.restored_paths import drop_foreign_paths
from tests.storage.saves import save_sharded
from tests.trainer.checkpoint.test_checkpoints import ResumableNet
from tests.trainer.pool import Pools
from tests.trainer.runs import Run, fit


class TakesAnything(ModelCheckpoint):
    """Takes up paths by itself, which nobody knows of."""

    hostile = ""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mine": self.hostile}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.best_model_path = state_dict["mine"] or self.best_model_path


def victims(folder: Path) -> list[Path]:
    """Of others: a text, a folder of texts, one whose index is something else's, and a checkpoint."""
    made = [folder / name for name in ("text", "texts", "site", "other.ckpt")]
    made[0].write_text("mine")
    for path in made[1:3]:
        path.mkdir()
        (path / "page.html").write_text("mine")
    (made[2] / "index.json").write_text("{}")
    torch.save({"state_dict": {}}, made[3])
    return made


def forms(victim: Path, folder: Path) -> dict[str, str]:
    """Ways to name it that Lightning takes for a path in the folder, or for one that it need not look at."""
    (folder / "linked").symlink_to(victim.parent)
    return {
        "dots": f"{folder}/../{victim.name}",
        "link": f"{folder}/linked/{victim.name}",
        "protocol": f"local://{victim}",
        "outside": str(victim),
    }


def run_of(folder: Path, callback: Callable[..., Any], strategy: str, max_steps: int, **options: Any) -> Run:
    keeping = {"dirpath": folder, "every_n_train_steps": 1, "save_last": True, "save_top_k": 1}
    trainer = {"max_steps": max_steps, "max_epochs": -1, "enable_checkpointing": True}
    return Run(ResumableNet, strategy, options, callbacks=((callback, keeping),), trainer=trainer)


@pytest.mark.parametrize(
    ("strategy", "processes", "callback"),
    [
        ("async", 2, TakesAnything),
        ("delayed", 1, ModelCheckpoint),
        pytest.param("async", 2, ModelCheckpoint, marks=pytest.mark.slow),
        pytest.param("delayed", 1, TakesAnything, marks=pytest.mark.slow),
    ],
)
def test_a_save_removes_nothing_of_others(
    pools: Pools, tmp_path: Path, strategy: str, processes: int, callback: type[ModelCheckpoint]
) -> None:
    folder = tmp_path / "checkpoints"
    pools.run(processes, fit, run_of(folder, callback, strategy, 1))
    (own,) = folder.glob("epoch*.ckpt")
    content = torch.load(own, weights_only=True)
    (state,) = content["callbacks"].values()
    text, _, _, other = victims(tmp_path)
    for number, victim in enumerate((text, other)):
        for form, path in forms(victim, folder).items():
            state.update(best_model_path=path, last_model_path=path, mine=path)
            state.update(best_k_models={path: tensor(9.0)}, kth_best_model_path=path)
            hostile = tmp_path / f"hostile-{number}.ckpt"
            torch.save(content, hostile)
            pools.run(processes, fit, replace(run_of(folder, callback, strategy, 3), ckpt_path=str(hostile)))
            assert victim.exists(), form
        (folder / "linked").unlink()


def test_what_is_dropped_and_what_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    own, part, gone = (str(folder / name) for name in ("a.ckpt", "b.ckpt", "gone.ckpt"))
    torch.save({}, own)
    save_sharded(part, 1)
    text = folder / "notes.txt"
    text.write_text("mine")
    callback = ModelCheckpoint(folder, save_top_k=3, monitor="loss")
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[callback], default_root_dir=tmp_path)
    scores = {own: tensor(1.0), part: tensor(2.0), gone: tensor(3.0), str(text): tensor(4.0)}
    state: dict[str, Any] = {"dirpath": str(folder), "best_k_models": scores, "kth_best_model_path": str(text)}
    state.update(best_model_path=own, last_model_path=part, kth_value=tensor(4.0))
    with pytest.warns(UserWarning, match=r"names '.*notes.txt' as what ModelCheckpoint has kept: no checkpoint in"):
        drop_foreign_paths(trainer, {"callbacks": {callback.state_key: state}})
    assert list(state["best_k_models"]) == [own, part, gone]
    assert (state["kth_best_model_path"], float(state["kth_value"])) == (gone, 3.0)
    assert (state["best_model_path"], state["last_model_path"]) == (own, part)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drop_foreign_paths(trainer, {"callbacks": {callback.state_key: state}})
    state["best_k_models"] = 7
    with pytest.warns(UserWarning, match="names '7'"):
        drop_foreign_paths(trainer, {"callbacks": {callback.state_key: state}})
    assert state["best_k_models"] == {}


def test_the_best_of_a_folder_that_was_moved_is_known(tmp_path: Path) -> None:
    """Lightning takes it up, for ``trainer.test(ckpt_path="best")``, and never removes it."""
    callback = ModelCheckpoint(tmp_path / "new")
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[callback], default_root_dir=tmp_path)
    best = str(tmp_path / "old" / "best.ckpt")
    state = {"dirpath": str(tmp_path / "old"), "best_k_models": {best: tensor(1.0)}, "best_model_path": best}
    drop_foreign_paths(trainer, {"callbacks": {callback.state_key: dict(state)}})
    assert state["best_model_path"] == best


@pytest.mark.parametrize(
    ("path", "is_in"),
    [("a", True), ("b/../a", True), ("b/a", True), ("", False), (".", False), ("..", False), ("b/..", False),
     ("../c", False), ("loop/a", False), ("\0/a", False), ("memory://a", False), ("nobody://a", False)],
)  # fmt: skip
def test_what_is_in_a_folder(tmp_path: Path, path: str, is_in: bool) -> None:
    folder = tmp_path / "folder"
    (folder / "b").mkdir(parents=True)
    (folder / "loop").symlink_to("loop")
    assert is_inside(path if "://" in path else f"{folder}/{path}", folder) is is_in


def test_what_is_in_a_folder_of_a_server() -> None:
    assert is_inside("memory://runs/a/x.ckpt", "memory://runs/a")
    for path in ("memory://runs/b/x.ckpt", "memory://runs/ab", "memory://runs/a/../b", "/runs/a/x.ckpt"):
        assert not is_inside(path, "memory://runs/a")


def test_what_is_no_checkpoint_is_not_removed(tmp_path: Path) -> None:
    files = DurableCheckpointIO()
    for victim in victims(tmp_path)[:3]:
        with pytest.warns(UserWarning, match=f"{victim} is not removed: it is no checkpoint"):
            files.remove_checkpoint(victim)
        assert victim.exists()
    legacy = tmp_path / "legacy.ckpt"
    torch.save({}, legacy, _use_new_zipfile_serialization=False)
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes((tmp_path / "other.ckpt").read_bytes()[:300])  # as a machine without power may leave one
    for path in (legacy, cut, tmp_path / "other.ckpt"):
        files.remove_checkpoint(path)
        assert not path.exists()

"""A byte that is not what was written: no copy hides it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_asyncpp.cli import main
from tests.storage.test_storage_damage import flip
from tests.trainer.checkpoint.test_resharding import SHARDED, run_of
from tests.trainer.pool import Pools
from tests.trainer.runs import fit


def damage(path: Path) -> Path:
    """Change a byte in the middle of the largest file, where tensors are."""
    file = max((part for part in (path, *path.rglob("*")) if part.is_file()), key=lambda part: part.stat().st_size)
    flip(file, file.stat().st_size // 2, 1)
    return file


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_copy_would_be_whole(form: str, pools: Pools, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pools.run(2, fit, run_of(tmp_path, **(SHARDED if form == "sharded" else {})))
    damage(tmp_path / "step=4.ckpt")
    for to in ("full", "sharded", "weights"):
        with pytest.raises(SystemExit) as end:
            main(["checkpoint", "convert", str(tmp_path / "step=4.ckpt"), str(tmp_path / to), "--to", to])
        assert end.value.code == 2
        assert "is damaged: its CRC-32 is" in capsys.readouterr().err
        assert not (tmp_path / to).exists()

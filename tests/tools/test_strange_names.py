"""Names that are no text, and texts that a terminal would obey: they are printed, and neither end nor fool anybody."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_asyncpp.cli import main
from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.tools.text import escaped

CONFIG = GPTConfig(vocab_size=256, context_length=8, num_layers=1, dim=8, num_heads=1, mlp_dim=8)
NAME = "caf\x1b[2J.ckpt"
SHOWN = r"caf\x1b[2J"


def written(monkeypatch: pytest.MonkeyPatch, encoding: str, *commands: list[str]) -> str:
    """What commands print to an output that takes nothing else than its encoding."""
    bytes_of = io.BytesIO()
    with monkeypatch.context() as patch, io.TextIOWrapper(bytes_of, encoding=encoding, errors="strict") as output:
        patch.setattr(sys, "stdout", output)
        for command in commands:
            main(command)
        output.flush()
        return bytes_of.getvalue().decode()


def saved(folder: Path, **more: Any) -> str:
    path = folder / NAME
    content = {"config": asdict(CONFIG), "model": GPT(CONFIG).state_dict(), "TextDataModule": {"tokenizer": "byte"}}
    torch.save({**content, **more}, path)
    return str(path)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_an_exported_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoding: str) -> None:
    pytest.importorskip("transformers")
    export = ["export", saved(tmp_path), "--output", f"{tmp_path}/{NAME}.export"]
    assert f"{SHOWN}.ckpt.export" in written(monkeypatch, encoding, export)


def test_a_prompt_that_is_no_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["generate", saved(tmp_path), "--tokenizer", "byte", "--prompt", os.fsdecode(b"\xe9")])
    assert r"the prompt '\udce9' is no text in UTF-8" in capsys.readouterr().err


def test_what_is_escaped() -> None:
    assert escaped("Zürich\u00a0 東京 🙂") == "Zürich\u00a0 東京 🙂"
    assert escaped("a\tb\x1b\x7f\u2028\u200b\udc80") == r"a\tb\x1b\x7f\u2028\u200b\udc80"


@pytest.mark.parametrize("form", ["weights", "full", "sharded"])
@pytest.mark.parametrize(
    ("tensor", "kind"),
    [(torch.eye(3).to_sparse(), "torch.sparse_coo"), (torch.eye(3).to_sparse_csr(), "torch.sparse_csr"),
     (torch.empty(3, device="meta"), "the meta device")],
)  # fmt: skip
def test_tensors_that_are_not_dense(tmp_path: Path, tensor: torch.Tensor, kind: str, form: str, capsys: Any) -> None:
    path = str(tmp_path / "x.ckpt")
    torch.save({"state_dict": {"a": tensor}, "pytorch-lightning_version": "2", "loops": {}}, path)
    main(["checkpoint", "info", path])
    with pytest.raises(SystemExit):
        main(["checkpoint", "convert", path, str(tmp_path / "y"), "--to", form])
    assert f"holds tensors of {kind}, and only dense ones are written" in capsys.readouterr().err
    assert not (tmp_path / "y").exists()

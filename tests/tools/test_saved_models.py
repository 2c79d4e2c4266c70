"""The commands on saved models: export, import and generate, on a checkpoint of a short training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import yaml
from safetensors.torch import load_file

from lightning_asyncpp import GPTModule
from lightning_asyncpp.cli import main
from lightning_asyncpp.data import TextDataModule
from lightning_asyncpp.models import GPTConfig
from lightning_asyncpp.storage import commit, load, new_target, write_part

ROOT = Path(__file__).parents[2]
CONFIG = GPTConfig(vocab_size=256, context_length=32, num_layers=2, dim=32, num_heads=2, mlp_dim=48)


class Trained(NamedTuple):
    """What a short training left behind."""

    folder: Path
    checkpoint: Path
    module: GPTModule
    data: TextDataModule

    @property
    def val_loss(self) -> float:
        """As the Trainer reports it, for the data that the model was trained with."""
        return validate(self.module, self.data)


def trainer(folder: Path, **more: Any) -> L.Trainer:
    return L.Trainer(
        default_root_dir=folder, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, **more,
    )  # fmt: skip


def validate(module: GPTModule, data: TextDataModule) -> float:
    runner = trainer(Path.cwd(), enable_checkpointing=False)
    return float(runner.validate(module, data, verbose=False)[0]["val_loss"])


def trained(folder: Path, config: GPTConfig, **data_options: Any) -> Trained:
    text = folder / "text"
    text.mkdir()
    for index in range(24):
        lines = [f"document {index} line {line}: größe {index * line}\n" for line in range(20)]
        (text / f"{index}.txt").write_text("".join(lines))
    L.seed_everything(0, verbose=False)
    options = {"context_length": 32, "batch_size": 8, "val_fraction": 0.2, "cache_dir": str(folder / "cache")}
    data = TextDataModule(str(text), **(options | data_options))
    module = GPTModule(config, warmup_steps=1)
    run = trainer(folder, max_steps=12, limit_val_batches=0)
    run.fit(module, datamodule=data)
    return Trained(folder, Path(run.checkpoint_callback.best_model_path), module, data)  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def by_bytes(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(tmp_path_factory.mktemp("bytes"), CONFIG)


@pytest.fixture(scope="module")
def by_pairs(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """With a vocabulary that was trained on the text, and rows that pad the model's matrices."""
    folder = tmp_path_factory.mktemp("pairs")
    return trained(folder, replace(CONFIG, vocab_size=384, tie_embeddings=True), tokenizer="bpe", vocab_size=320)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Runs ``asyncpp ...`` in this process; what it printed, or with ``fails`` why it ended with code 2."""
    monkeypatch.setattr(sys, "argv", ["asyncpp"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))

    def run(*arguments: Any, fails: bool = False) -> str:
        capsys.readouterr()
        if not fails:
            main([str(argument) for argument in arguments])
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return error

    return run


@pytest.mark.parametrize("which", ["by_bytes", "by_pairs"])
def test_export_import_generate(which: str, request: pytest.FixtureRequest, command: Any, tmp_path: Path) -> None:
    """The same weights, the same loss and the same text, wherever they are read from."""
    run: Trained = request.getfixturevalue(which)
    printed = command("export", run.checkpoint, "--output", tmp_path / "out")
    assert printed.startswith(f"LlamaForCausalLM of {run.module.config.num_parameters():,} parameters: ")
    files = {path.name for path in (tmp_path / "out").iterdir() if path.suffix == ".json"}
    assert files == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    printed = command("import", tmp_path / "out", "--output", tmp_path / "in.ckpt")
    arguments = yaml.safe_load(printed)["model"]["init_args"]
    assert arguments["initial_weights"] == str(tmp_path / "in.ckpt")
    (tmp_path / "new").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "new", tmp_path / "in.ckpt", *(tmp_path / "out").iterdir())}
    assert len(modes) == 1  # others may read all of it as any new file
    module = GPTModule(**arguments)
    module.configure_model()
    loaded = GPTModule.load_from_checkpoint(tmp_path / "in.ckpt", weights_only=True)
    state = run.module.state_dict()
    for made in (module, loaded):
        assert all(torch.equal(tensor, state[name]) for name, tensor in made.state_dict().items())
    texts = {
        command("generate", path, "--prompt", "document 3 li", "--greedy", "--max-new-tokens", "40")
        for path in (run.checkpoint, tmp_path / "out", tmp_path / "in.ckpt")
    }
    assert len(texts) == 1
    assert texts.pop().startswith("document 3 li")
    assert [validate(made, run.data) for made in (module, loaded)] == [pytest.approx(run.val_loss, rel=1e-6)] * 2


def test_what_was_imported_is_validated_and_is_no_training_to_go_on_with(
    by_bytes: Trained, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("export", by_bytes.checkpoint, "--output", tmp_path / "out")
    model = yaml.safe_load(command("import", tmp_path / "out", "--output", tmp_path / "in.ckpt"))["model"]
    data = {"source": str(by_bytes.folder / "text"), "context_length": 32, "batch_size": 8, "val_fraction": 0.2}
    trainer_options = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "max_steps": 1,
    }
    recipe = {
        "model": {**model, "init_args": {"config": model["init_args"]["config"]}},
        "data": {"class_path": "lightning_asyncpp.data.TextDataModule", "init_args": data},
        "trainer": trainer_options,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    arguments = ("--config", tmp_path / "recipe.yaml", "--ckpt_path", tmp_path / "in.ckpt")
    found = re.search(r"val_loss\W+(\d+\.\d+)", command("validate", *arguments))
    assert found is not None
    assert float(found.group(1)) == pytest.approx(by_bytes.val_loss, rel=1e-6)
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        command("fit", *arguments)


def test_the_exported_tokenizer_is_the_runs(by_bytes: Trained, by_pairs: Trained, command: Any, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    for name, run in (("bytes", by_bytes), ("pairs", by_pairs)):
        command("export", run.checkpoint, "--output", tmp_path / name, "--dtype", "bfloat16")
        (file,) = (tmp_path / name).glob("*.safetensors")
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        ours = run.data.tokenizer
        text = "document 7: größe Ā\n\t日本 🙂"
        assert theirs(text).input_ids == ours.encode_batch([text])[0].tolist()
        assert theirs.decode(theirs(text).input_ids) == text
        assert theirs.eos_token_id == ours.end_of_document
        assert theirs.model_max_length == 32
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert model.generation_config.eos_token_id == ours.end_of_document


def test_generate_draws_by_its_seed(by_bytes: Trained, command: Any) -> None:
    """Beyond the context, too; an empty prompt is the beginning of a document."""

    def text(*arguments: str) -> str:
        printed: str = command("generate", by_bytes.checkpoint, "--max-new-tokens", "80", *arguments)
        return printed

    first = text("--seed", "1")
    assert first == text("--seed", "1") != text("--seed", "2")
    narrow = text("--prompt", "document", "--top-k", "1")
    assert narrow == text("--prompt", "document", "--temperature", "0") == text("--prompt", "document", "--greedy")
    assert text("--top-p", "0.5", "--temperature", "0.7", "--dtype", "bfloat16")


def test_what_cannot_be_generated(by_bytes: Trained, by_pairs: Trained, command: Any, tmp_path: Path) -> None:
    bare = tmp_path / "bare.ckpt"
    state = by_bytes.module.model.state_dict()  # type: ignore[union-attr]
    torch.save({"model": state}, bare)
    assert "says nothing of the model's shape" in command("generate", bare, fails=True)
    torch.save({"model": state, "config": {"width": 3}}, bare)
    assert "holds the config of another model" in command("generate", bare, fails=True)
    torch.save({"model": state, "config": asdict(CONFIG)}, bare)
    known = ("generate", bare, "--max-new-tokens", "4")
    assert "holds no tokenizer; name it" in command(*known, fails=True)
    assert command(*known, "--tokenizer", "byte", "--prompt", "doc").startswith("doc")
    state["head.weight"] = torch.full_like(state["head.weight"], float("nan"))
    torch.save({"model": state, "config": asdict(CONFIG)}, tmp_path / "diverged.ckpt")
    error = command("generate", tmp_path / "diverged.ckpt", *known[2:], "--tokenizer", "byte", fails=True)
    assert "the highest logit is nan, and no token can be drawn" in error
    by_pairs.data.tokenizer.save(tmp_path)
    other = tmp_path / "tokenizer.json"
    error = command(*known, "--tokenizer", other, fails=True)
    assert "has 320 token ids" in error
    assert "vocab_size=256" in error
    error = command("generate", by_bytes.checkpoint, "--tokenizer", other, fails=True)
    assert "vocab_size=256" in error
    assert "--prompt has 50 tokens, and the model sees context_length=32" in command(
        "generate", by_bytes.checkpoint, "--prompt", "x" * 50, fails=True
    )
    error = command("generate", by_bytes.checkpoint, "--temperature", "-1", "--top-p", "3", fails=True)
    assert "temperature=-1.0: must be" in error
    assert "top_p=3.0: must be" in error
    assert "is no checkpoint, and no folder" in command("generate", tmp_path / "absent", fails=True)


def test_what_cannot_be_exported_or_imported(by_bytes: Trained, command: Any, tmp_path: Path) -> None:
    out = ("--output", tmp_path / "out")
    command("export", by_bytes.checkpoint, *out)
    assert "out exists already" in command("export", by_bytes.checkpoint, *out, fails=True)
    (tmp_path / "in.ckpt").touch()
    assert "exists already" in command("import", tmp_path / "out", "--output", tmp_path / "in.ckpt", fails=True)
    assert "config.json cannot be read" in command("import", tmp_path, fails=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "in.ckpt"}


def test_a_sharded_checkpoint_is_read_as_one_file_is(by_bytes: Trained, command: Any, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded.ckpt"
    first = load(Path(by_bytes.checkpoint))
    names = list(first["state_dict"])
    second = {"state_dict": {name: first["state_dict"].pop(name) for name in names[len(names) // 2 :]}}
    target = new_target(sharded)
    commit(target, dict(write_part(target, stage, part) for stage, part in enumerate((first, second))))
    both = sharded, by_bytes.checkpoint
    written = [command("generate", path, "--greedy", "--max-new-tokens", "8") for path in both]
    assert written[0] == written[1]
    for path in both:
        command("export", path, "--output", tmp_path / f"{path.stem}-hf")
    (one,), (other,) = ((tmp_path / f"{p.stem}-hf").glob("*.safetensors") for p in both)
    assert one.read_bytes() == other.read_bytes()
    next(sharded.glob("*stage-0001*")).unlink()
    assert "is missing, though index.json names it" in command("generate", sharded, fails=True)


@pytest.mark.slow
def test_a_prompt_and_its_text_from_the_shell(by_bytes: Trained) -> None:
    """As the installed command prints it, without anything else."""
    done = subprocess.run(
        [sys.executable, "-m", "lightning_asyncpp", "generate", str(by_bytes.checkpoint), "--prompt", "document 1",
         "--max-new-tokens", "5", "--greedy"],
        capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("document 1")
    assert done.stdout.count("\n") == 1 + done.stdout.rstrip("\n").count("\n")

"""The commands export, import and generate work on the checkpoint of a short training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import tokenizers
import torch
import yaml
from safetensors.torch import load_file

from lightning_asyncpp import GPTModule
from lightning_asyncpp.cli import main
from lightning_asyncpp.data import ByteTokenizer, TextDataModule, Tokenizer
from lightning_asyncpp.data.tokenizer import prompt_tokens
from lightning_asyncpp.models import GPTConfig
from lightning_asyncpp.storage import commit, load, new_target, write_part
from lightning_asyncpp.tools.generate import stream
from tests.helpers.models import write_texts
from tests.helpers.trainer import Net, Run, make_trainer

CONFIG = GPTConfig(vocab_size=256, context_length=32, num_layers=2, dim=32, num_heads=2, mlp_dim=48)


class Trained(NamedTuple):
    """Results of a short training."""

    folder: Path
    checkpoint: Path
    module: GPTModule
    data: TextDataModule


def trained(folder: Path, config: GPTConfig, **data_options: Any) -> Trained:
    text = write_texts(folder / "text", 24)
    L.seed_everything(0, verbose=False)
    shape = {"context_length": 32, "batch_size": 8, "val_fraction": 0.2, "cache_dir": str(folder / "cache")}
    data = TextDataModule(str(text), **(shape | data_options))
    module = GPTModule(config, warmup_steps=1)
    options = {"default_root_dir": folder, "max_steps": 12, "limit_val_batches": 0, "enable_checkpointing": True}
    run = make_trainer(Run(Net, "plain"), **options)
    run.fit(module, datamodule=data)
    return Trained(folder, Path(run.checkpoint_callback.best_model_path), module, data)  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def by_bytes(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(tmp_path_factory.mktemp("bytes"), CONFIG)


@pytest.fixture(scope="module")
def by_pairs(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train with a vocabulary that was trained on the text, and with padding rows in the model's vocabulary."""
    folder = tmp_path_factory.mktemp("pairs")
    return trained(folder, replace(CONFIG, vocab_size=384, tie_embeddings=True), tokenizer="bpe", vocab_size=320)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs ``asyncpp ...`` and returns its output, or with ``fails`` the error that ended it."""
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


@pytest.mark.parametrize("which", [pytest.param("by_bytes", marks=pytest.mark.slow), "by_pairs"])
def test_export_import_generate(which: str, request: pytest.FixtureRequest, command: Any, tmp_path: Path) -> None:
    run: Trained = request.getfixturevalue(which)
    printed = command("export", run.checkpoint, tmp_path / "out")
    assert printed.startswith(f"LlamaForCausalLM of {sum(p.numel() for p in run.module.parameters()):,} parameters: ")
    files = {path.name for path in (tmp_path / "out").iterdir() if path.suffix == ".json"}
    assert files == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    printed = command("import", tmp_path / "out", "--output", tmp_path / "in.ckpt")
    arguments = yaml.safe_load(printed)["model"]["init_args"]
    assert arguments["initial_weights"] == str(tmp_path / "in.ckpt")
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


def test_the_exported_tokenizer_is_the_runs(by_bytes: Trained, by_pairs: Trained, command: Any, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    for name, run in (("bytes", by_bytes), ("pairs", by_pairs)):
        command("export", run.checkpoint, tmp_path / name, "--dtype", "bfloat16")
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


def test_what_cannot_be_generated(by_bytes: Trained, by_pairs: Trained, command: Any, tmp_path: Path) -> None:
    bare, state = tmp_path / "bare.ckpt", by_bytes.module.model.state_dict()  # type: ignore[union-attr]
    torch.save({"model": state, "config": asdict(CONFIG)}, bare)
    assert "has no tokenizer; name one" in command("generate", bare, fails=True)
    text = command("generate", bare, "--tokenizer", "byte", "--prompt", "doc", "--max-new-tokens", "4")
    assert text.startswith("doc")
    assert "--device foo: torch has no" in command("generate", bare, "--device", "foo", fails=True)
    (tmp_path / "tokenizer.json").write_text(by_pairs.data.tokenizer.definition)
    assert "has 320 tokens" in command("generate", bare, "--tokenizer", tmp_path / "tokenizer.json", fails=True)
    state["head.weight"] = torch.full_like(state["head.weight"], float("nan"))
    torch.save({"model": state, "config": asdict(CONFIG)}, bare)
    error = command("generate", bare, "--tokenizer", "byte", fails=True)
    assert "the highest logit is nan, and no token can be drawn" in error


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
        command("export", path, tmp_path / f"{path.stem}-hf")
    (one,), (other,) = ((tmp_path / f"{p.stem}-hf").glob("*.safetensors") for p in both)
    assert one.read_bytes() == other.read_bytes()
    next(sharded.glob("*stage-0001*")).unlink()
    assert "is missing, though index.json names it" in command("generate", sharded, fails=True)


# -- the text that is shown while it is generated ---------------------------------------------------------------------


def test_text_comes_when_its_characters_are_complete() -> None:
    text = "größe 日本 🙂!"
    tokens = list(text.encode())
    pieces = list(stream(ByteTokenizer(), iter(tokens)))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[:3] == ["g", "r", "ö"]
    # A character that stays incomplete is shown at the end.
    assert "".join(stream(ByteTokenizer(), iter(tokens[:3]))) == "gr\ufffd"
    trained = Tokenizer.train([text * 20], 300)
    assert "".join(stream(trained, iter(trained.encode_batch([text])[0].tolist()))) == text


def test_the_space_behind_a_prompt() -> None:
    """Tokenizers such as Llama 2's drop the first space of a text, but the space after a prompt must be kept."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"▁one": 0, "▁two": 1, "</s>": 2, "?": 3}, unk_token="?")
    )
    backend.add_special_tokens(["</s>"])
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    prompt = prompt_tokens(tokenizer, "one")
    assert prompt == [0]
    assert "".join(stream(tokenizer, iter([1, 0, 2]), prompt)) == " two one"
    assert "".join(stream(tokenizer, iter([1, 0, 2]), [2])) == "two one"

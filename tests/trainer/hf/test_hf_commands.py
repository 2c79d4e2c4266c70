"""The recipes train a small model over two stages, go on exactly, and become folders of transformers again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lightning_asyncpp import HFModule
from lightning_asyncpp.cli import main
from lightning_asyncpp.data import ChatDataModule, TextDataModule
from tests.helpers.hf_folders import make_folder, make_tokenizer
from tests.helpers.pool import Pools
from tests.helpers.trainer import Run, make_trainer

ROOT = Path(__file__).parents[3]
ON_CPU = ["--trainer.accelerator", "cpu", "--trainer.log_every_n_steps", "1"]
IN_FP32 = ["--trainer.precision", "32-true", "--trainer.strategy.init_args.weight_dtype", "null"]
LORA = '{"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]}'


def command(folder: str, *arguments: str) -> str:
    """``asyncpp ...`` in a process that stands where torchrun would have started it."""
    before, argv = os.getcwd(), sys.argv
    os.chdir(folder)
    try:
        main(list(arguments))
    finally:
        os.chdir(before)
        sys.argv = argv
    return ""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, text and conversations."""
    folder = tmp_path_factory.mktemp("place")
    make_folder(folder / "model")
    make_folder(folder / "others", vocab_size=280)
    (folder / "text").mkdir()
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text(f"the quick brown fox {number}, and what it jumps over\n" * 9)
    rows = [{"prompt": f"What is {n} and two?", "response": f"It is {n + 2}. " * (n % 3 + 1)} for n in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def continued(place: Path, name: str) -> list[str]:
    return [
        "fit", "--config", str(ROOT / "recipes" / "hf_continue.yaml"), *ON_CPU, "--trainer.logger.init_args.name", name,
        "--trainer.max_steps", "3", "--trainer.val_check_interval", "3", "--trainer.limit_val_batches", "1",
        "--trainer.strategy.init_args.microbatches", "4", "--model.init_args.model_id", str(place / "model"),
        "--model.init_args.warmup_steps", "1", "--data.init_args.source", str(place / "text"),
        "--data.init_args.tokenizer", str(place / "model"), "--data.init_args.cache_dir", str(place / "cache"),
        "--data.init_args.context_length", "32", "--data.init_args.batch_size", "8", "--data.init_args.val_fraction",
        "0.2", "--data.init_args.num_workers", "0",
    ]  # fmt: skip


def fine_tuned(place: Path, name: str, steps: int, *more: str) -> list[str]:
    return [
        "fit", "--config", str(ROOT / "recipes" / "hf_finetune.yaml"), *ON_CPU, *IN_FP32,
        "--trainer.logger.init_args.name", name,
        "--trainer.max_steps", str(steps), "--trainer.strategy.init_args.microbatches", "2",
        "--model.init_args.model_id", str(place / "model"), "--model.init_args.total_steps", "8",
        "--model.init_args.warmup_steps", "1", "--model.init_args.optimizer.init_args.lr", "0.01",
        "--data.init_args.source", str(place / "rows.jsonl"), "--data.init_args.tokenizer", str(place / "model"),
        "--data.init_args.cache_dir", str(place / "cache"), "--data.init_args.max_length", "60",
        "--data.init_args.batch_size", "6", "--data.init_args.num_workers", "0", *more,
    ]  # fmt: skip


def checkpoint_of(place: Path, name: str) -> Path:
    (found,) = (place / "runs" / name).glob("*/checkpoints/last.ckpt")
    return found


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def test_continued_pretraining_becomes_a_folder_again(pools: Pools, place: Path) -> None:
    pools.run(2, command, str(place), *continued(place, "continued"), timeout=120)
    checkpoint, out = checkpoint_of(place, "continued"), place / "continued"
    main(["export", str(checkpoint), "--output", str(out)])
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    trained, before = weights_in(checkpoint), transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    assert model.state_dict().keys() == trained.keys() == before.state_dict().keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
    assert not all(torch.equal(p, trained[name]) for name, p in before.named_parameters())
    module = HFModule.load_from_checkpoint(checkpoint)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in module.model.state_dict().items())  # type: ignore[union-attr]
    changed = {"_name_or_path", "dtype", "transformers_version"}
    own, written = (json.loads((folder / "config.json").read_text()) for folder in (place / "model", out))
    assert {k: v for k, v in written.items() if k not in changed} == {k: v for k, v in own.items() if k not in changed}
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("two é")["input_ids"] == make_tokenizer()("two é")["input_ids"]
    assert tokenizer.chat_template == make_tokenizer().chat_template


def test_fine_tuning_goes_on_exactly_in_the_middle_of_an_epoch(pools: Pools, place: Path) -> None:
    saves = "lightning.pytorch.callbacks.ModelCheckpoint"
    more = (
        f"--trainer.callbacks+={saves}", "--trainer.callbacks.every_n_train_steps=3",
        "--trainer.callbacks.save_top_k=-1", "--trainer.callbacks.filename={step}",
        f"--trainer.callbacks.dirpath={place}",
    )  # fmt: skip
    pools.run(2, command, str(place), *fine_tuned(place, "whole", 8, *more), timeout=120)
    first = place / "step=3.ckpt"
    (place / "model").rename(place / "moved")
    try:
        moved = ("--ckpt_path", str(first), "--model.init_args.model_id", str(place / "moved"))
        more = (*moved, "--data.init_args.tokenizer", str(place / "moved"))
        pools.run(2, command, str(place), *fine_tuned(place, "rest", 8, *more), timeout=120)
    finally:
        (place / "moved").rename(place / "model")
    whole, resumed = weights_in(checkpoint_of(place, "whole")), weights_in(checkpoint_of(place, "rest"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    assert not all(torch.equal(tensor, weights_in(first)[name]) for name, tensor in whole.items())


def test_adapters_are_exported_merged_or_alone(pools: Pools, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pools.run(2, command, str(place), *fine_tuned(place, "lora", 4, "--model.init_args.lora", LORA), timeout=120)
    checkpoint = str(checkpoint_of(place, "lora"))
    main(["export", checkpoint, "--output", str(place / "merged"), "--dtype", "bfloat16"])
    main(["export", checkpoint, "--output", str(place / "whole-merged")])
    main(["export", checkpoint, "--output", str(place / "adapter"), "--lora", "adapter"])
    assert "LlamaForCausalLM of" in capsys.readouterr().out
    import peft

    base = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    tokens = torch.arange(1, 20)[None]
    untrained = base(tokens).logits
    merged = transformers.AutoModelForCausalLM.from_pretrained(place / "whole-merged")
    adapted = peft.PeftModel.from_pretrained(base, place / "adapter")
    torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(adapted(tokens).logits, untrained, atol=1e-3)
    assert json.loads((place / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        place / "model"
    )
    assert not list((place / "adapter").glob("model*.safetensors"))
    short = transformers.AutoModelForCausalLM.from_pretrained(place / "merged")
    assert {p.dtype for p in short.parameters()} == {torch.bfloat16}
    trained = weights_in(Path(checkpoint))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(merged.state_dict()[name], trained[f"base_model.model.{name}"])


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("model", {"tokenizer": "byte"}, "another tokenizer than the weights"),
        ("model", {"context_length": 65}, "context_length=65 of the data is longer"),
        ("others", {}, "vocabulary of 290 token ids, and the model only 280"),
    ],
)
def test_data_that_is_not_the_models_is_refused(
    place: Path, model: str, arguments: dict[str, Any], message: str
) -> None:
    shape = {"tokenizer": str(place / "model"), "context_length": 32, "cache_dir": str(place / "cache"), **arguments}
    data = TextDataModule(str(place / "text"), batch_size=2, val_fraction=0.2, **shape)
    module = HFModule(str(place / model))
    with pytest.raises(ValueError, match=message):
        make_trainer(Run(HFModule, "plain")).fit(module, datamodule=data)  # type: ignore[arg-type]
    assert module.model is None


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("model", {"max_length": 65}, "max_length=65 is longer than the model's context of 64"),
        ("others", {}, "vocabulary of 280 token ids"),
    ],
)
def test_conversations_that_are_not_the_models_are_refused(
    place: Path, model: str, arguments: dict[str, Any], message: str
) -> None:
    shape = {"max_length": 60, "cache_dir": str(place / "cache"), **arguments}
    data = ChatDataModule(str(place / "rows.jsonl"), str(place / "model"), batch_size=2, **shape)
    module = HFModule(str(place / model))
    with pytest.raises(ValueError, match=message):
        make_trainer(Run(HFModule, "plain")).fit(module, datamodule=data)  # type: ignore[arg-type]
    assert module.model is None


def test_what_cannot_be_exported_is_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    said = {"config": model.config.to_dict(), "task": "AutoModelForCausalLM", "lora": None, "model_id": "gone"}
    torch.save({"state_dict": state, "hf": said}, place / "own.ckpt")
    main(["export", str(place / "own.ckpt"), "--output", str(place / "without")])
    assert "Without a tokenizer: that of gone is not on this machine" in capsys.readouterr().out
    torch.save({"state_dict": dict(list(state.items())[1:]), "hf": said}, place / "lacks.ckpt")
    for arguments, message in (
        (["own.ckpt", "--output", str(place / "without")], "exists already"),
        (["own.ckpt", "--output", str(place / "x"), "--lora", "adapter"], "was trained without adapters"),
        (["own.ckpt", "--output", str(place / "x"), "--tokenizer", str(place / "text")], "--tokenizer"),
        (["lacks.ckpt", "--output", str(place / "x")], "model.embed_tokens.weight"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["export", str(place / arguments[0]), *arguments[1:]])
        assert message in capsys.readouterr().err
        assert not (place / "x").exists()

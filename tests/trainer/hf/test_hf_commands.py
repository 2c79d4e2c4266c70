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
from tests.helpers.models import make_folder, make_tokenizer
from tests.helpers.pool import Pools
from tests.helpers.trainer import Run, make_trainer

ROOT = Path(__file__).parents[3]
ON_CPU = ["--trainer.accelerator", "cpu", "--trainer.log_every_n_steps", "1"]
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


def fine_tuned(place: Path, name: str, *more: str) -> list[str]:
    """Adapters in fp32, with a checkpoint after three steps in the middle of an epoch."""
    saves = "--trainer.callbacks"
    return [
        "fit", "--config", str(ROOT / "recipes" / "hf_finetune.yaml"), *ON_CPU, "--trainer.precision", "32-true",
        "--trainer.strategy.init_args.weight_dtype", "null", "--trainer.logger.init_args.name", name,
        "--trainer.max_steps", "8", "--trainer.strategy.init_args.microbatches", "2", "--model.init_args.lora", LORA,
        "--model.init_args.model_id", str(place / "model"), "--model.init_args.total_steps", "8",
        "--model.init_args.warmup_steps", "1", "--model.init_args.optimizer.init_args.lr", "0.01",
        "--data.init_args.source", str(place / "rows.jsonl"), "--data.init_args.tokenizer", str(place / "model"),
        "--data.init_args.cache_dir", str(place / "cache"), "--data.init_args.max_length", "60",
        "--data.init_args.batch_size", "6", "--data.init_args.num_workers", "0",
        f"{saves}+=lightning.pytorch.callbacks.ModelCheckpoint", f"{saves}.every_n_train_steps=3",
        f"{saves}.save_top_k=-1", f"{saves}.filename={{step}}", f"{saves}.dirpath={place}", *more,
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
    main(["export", str(checkpoint), str(out)])
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


def test_adapters_go_on_exactly_and_are_exported_merged_or_alone(pools: Pools, place: Path) -> None:
    pools.run(2, command, str(place), *fine_tuned(place, "whole"), timeout=120)
    first, checkpoint = place / "step=3.ckpt", checkpoint_of(place, "whole")
    pools.run(2, command, str(place), *fine_tuned(place, "rest", "--ckpt_path", str(first)), timeout=120)
    trained, resumed = weights_in(checkpoint), weights_in(checkpoint_of(place, "rest"))
    assert trained.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in trained.items())
    assert not all(torch.equal(tensor, weights_in(first)[name]) for name, tensor in trained.items())

    main(["export", str(checkpoint), str(place / "short"), "--dtype", "bfloat16"])
    main(["export", str(checkpoint), str(place / "merged")])
    main(["export", str(checkpoint), str(place / "adapter"), "--lora", "adapter"])
    import peft

    base = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    tokens = torch.arange(1, 20)[None]
    untrained = base(tokens).logits
    merged = transformers.AutoModelForCausalLM.from_pretrained(place / "merged")
    adapted = peft.PeftModel.from_pretrained(base, place / "adapter")
    torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(adapted(tokens).logits, untrained, atol=1e-3)
    assert not list((place / "adapter").glob("model*.safetensors"))
    short = transformers.AutoModelForCausalLM.from_pretrained(place / "short")
    assert {p.dtype for p in short.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("model", {"tokenizer": "byte"}, "the data's tokenizer is not that of"),
        ("others", {}, "vocabulary of 290 token ids, and the model only 280"),
        ("model", {"max_length": 65}, "max_length=65 is longer than the model's context of 64"),
        ("others", {"max_length": 60}, "vocabulary of 280 token ids"),
    ],
)
def test_data_that_is_not_the_models_is_refused(
    place: Path, model: str, arguments: dict[str, Any], message: str
) -> None:
    shape = {"tokenizer": str(place / "model"), "cache_dir": str(place / "cache"), "batch_size": 2, **arguments}
    data: Any = (
        ChatDataModule(str(place / "rows.jsonl"), **shape)
        if "max_length" in arguments
        else TextDataModule(str(place / "text"), **{"context_length": 32, "val_fraction": 0.2, **shape})
    )
    module = HFModule(str(place / model))
    with pytest.raises(ValueError, match=message):
        make_trainer(Run(HFModule, "plain")).fit(module, datamodule=data)  # type: ignore[arg-type]
    assert module.model is None

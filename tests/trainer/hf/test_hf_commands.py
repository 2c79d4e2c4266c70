"""Recipes train a small model over two stages, and their checkpoints can be exported as transformers folders."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lightning_asyncpp import HFModule
from lightning_asyncpp.cli import main
from lightning_asyncpp.data import ChatDataModule, TextDataModule
from tests.helpers.models import make_folder, make_tokenizer, write_texts
from tests.helpers.pool import Pools
from tests.helpers.trainer import Run, make_trainer
from tests.trainer.hf import test_hf_module as hf

RECIPES = Path(__file__).parents[3] / "recipes"
LORA = '{"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]}'
model_of: Callable[..., Any] = transformers.AutoModelForCausalLM.from_pretrained


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two models, text and conversations."""
    folder = tmp_path_factory.mktemp("place")
    make_folder(folder / "model")
    make_folder(folder / "others", vocab_size=280)
    write_texts(folder / "text", 20)
    rows = [{"prompt": f"What is {n} and two?", "response": f"It is {n + 2}. " * (n % 3 + 1)} for n in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def command(folder: str, *arguments: str) -> None:
    """Run ``asyncpp ...`` in a process of a pool, which has an environment like torchrun's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["asyncpp"])
        main(list(arguments))


def trained(pools: Pools, place: Path, recipe: str, **given: dict[str, Any]) -> tuple[Path, dict[str, torch.Tensor]]:
    """Run a recipe in two processes, and return its last checkpoint and the weights in it."""
    cpu = {"accelerator": "cpu", "log_every_n_steps": 1}
    model = {"model_id": place / "model", "warmup_steps": 1}
    data = {"tokenizer": place / "model", "cache_dir": place / "cache", "num_workers": 0}
    options = {
        "trainer": cpu | given["trainer"], "trainer.strategy.init_args": given["strategy"],
        "model.init_args": model | given["model"], "data.init_args": data | given["data"],
    }  # fmt: skip
    words = [f"--{of}.{name}={value}" for of, values in options.items() for name, value in values.items()]
    config = str(RECIPES / f"{recipe}.yaml")
    pools.run(2, command, str(place), "fit", "--config", config, *words, timeout=120)
    (checkpoint,) = (place / "runs" / recipe).glob("*/checkpoints/last.ckpt")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    return checkpoint, {name.removeprefix("model."): tensor for name, tensor in state.items()}


def test_continued_pretraining_becomes_a_folder_again(pools: Pools, place: Path) -> None:
    data = {"source": place / "text", "context_length": 32, "batch_size": 8, "val_fraction": 0.2}
    checkpoint, weights = trained(
        pools, place, "hf_continue", strategy={"microbatches": 4}, model={}, data=data,
        trainer={"max_steps": 3, "val_check_interval": 3, "limit_val_batches": 1},
    )  # fmt: skip
    out = place / "continued"
    main(["export", str(checkpoint), str(out)])
    before, module = model_of(place / "model"), HFModule.load_from_checkpoint(checkpoint)
    for state in (model_of(out).state_dict(), module.model.state_dict()):  # type: ignore[union-attr]
        assert state.keys() == weights.keys() == before.state_dict().keys()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in state.items())
    assert not all(torch.equal(p, weights[name]) for name, p in before.named_parameters())
    own, written = (json.loads((folder / "config.json").read_text()) for folder in (place / "model", out))
    assert {k for k in own | written if own.get(k) != written.get(k)} <= {
        "_name_or_path", "dtype", "transformers_version",
    }  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("two é")["input_ids"] == make_tokenizer()("two é")["input_ids"]
    assert tokenizer.chat_template == make_tokenizer().chat_template


@pytest.mark.slow
def test_adapters_over_processes_train_as_in_one(pools: Pools, tmp_path: Path) -> None:
    """This test is in this file because the processes have already imported what it needs."""
    folder, arguments = make_folder(tmp_path / "llama", tie_word_embeddings=True), {"lora": hf.LORA}
    hf.check_equal_to_one(pools.run(2, hf.fit, folder, arguments, 0), folder, arguments)


def test_adapters_are_exported_merged_or_alone(pools: Pools, place: Path) -> None:
    checkpoint, _ = trained(
        pools, place, "hf_finetune", trainer={"max_steps": 5, "precision": "32-true"},
        strategy={"microbatches": 2, "weight_dtype": "null"},
        model={"lora": LORA, "total_steps": 5, "optimizer.init_args.lr": 0.01},
        data={"source": place / "rows.jsonl", "max_length": 60, "batch_size": 6},
    )  # fmt: skip
    for name, how in (("short", ["--dtype", "bfloat16"]), ("merged", []), ("adapter", ["--lora", "adapter"])):
        main(["export", str(checkpoint), str(place / name), *how])
    import peft

    tokens, base = torch.arange(1, 20)[None], model_of(place / "model")
    untrained = base(tokens).logits
    adapted = peft.PeftModel.from_pretrained(base, place / "adapter")(tokens).logits
    torch.testing.assert_close(model_of(place / "merged")(tokens).logits, adapted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(adapted, untrained, atol=1e-3)
    assert not list((place / "adapter").glob("model*.safetensors"))
    assert {p.dtype for p in model_of(place / "short").parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("model", {"tokenizer": "byte"}, "the data's tokenizer is not that of"),
        ("others", {}, "vocabulary of 290 token ids, and the model only 280"),
        ("model", {"max_length": 65}, "max_length=65 is longer than the model's context of 64"),
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

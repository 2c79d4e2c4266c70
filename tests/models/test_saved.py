"""Saved models: checkpoints of the Trainer and of Fabric, and models that start from them."""

from __future__ import annotations

import copy
import json
import pickle
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from lightning_asyncpp.core.cut.cutting import materialize
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.models import GPT, GPTConfig, WeightsError, open_saved, start_from
from lightning_asyncpp.tools.checkpoint import main
from lightning_asyncpp.trainer.gpt_module import GPTModule
from tests.helpers.hf_cases import CASES, exported, make_model, tokens_of

CONFIG = CASES["llama"][1]


def same(model: nn.Module, other: nn.Module) -> bool:
    """Bitwise, buffers that are in no ``state_dict`` included."""
    tensors, others = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (model, other))
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


def trained(folder: Path, config: GPTConfig = CONFIG) -> tuple[GPTModule, Path]:
    """A module after an update, and its checkpoint."""
    L.seed_everything(0, verbose=False)
    module = GPTModule(config, warmup_steps=1)
    trainer = L.Trainer(
        default_root_dir=folder, accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    tokens = torch.randint(0, config.vocab_size, (4, 17))
    trainer.fit(module, DataLoader(tokens, batch_size=4))  # type: ignore[arg-type]
    return module, Path(trainer.checkpoint_callback.best_model_path)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["llama-tied", "glm4-moe"])
@torch.no_grad()
def test_a_checkpoint_of_the_trainer(name: str, tmp_path: Path) -> None:
    config = CASES[name][1]
    module, path = trained(tmp_path, config)
    found = open_saved(path)
    assert found.config == config
    assert found.tokenizer is None
    model = found.build()
    assert module.model is not None
    assert same(model, module.model)
    assert not model.training
    tokens = tokens_of(config)
    assert torch.equal(model(tokens), module.eval().model(tokens))  # type: ignore[misc]
    half = found.build(dtype=torch.bfloat16)
    assert half.head.weight.dtype == torch.bfloat16
    fp32 = {name.rpartition(".")[2] for name, buffer in half.named_buffers() if buffer.dtype == torch.float32}
    assert fp32 == {"cos", "sin"} | ({"balance_bias"} if config.moe else set())


def test_what_fabric_saves(tmp_path: Path) -> None:
    model = make_model(CONFIG)
    fabric = L.Fabric(accelerator="cpu", devices=1)
    whole = {"network": fabric.setup_module(model), "config": asdict(CONFIG), "tokenizer": "byte", "step": 3}
    fabric.save(tmp_path / "whole.ckpt", whole)
    found = open_saved(tmp_path / "whole.ckpt")
    assert same(found.build(), model)
    assert found.tokenizer == "byte"
    fabric.save(tmp_path / "bare.ckpt", {"network": whole["network"], "step": 3})
    with pytest.raises(WeightsError, match=r"says nothing of the model\'s shape.*dataclasses\.asdict\(config\)"):
        open_saved(tmp_path / "bare.ckpt")
    assert same(open_saved(tmp_path / "bare.ckpt", CONFIG).build(), model)
    # What somebody else calls a config says nothing of the model, and does not stand in the way.
    fabric.save(tmp_path / "other.ckpt", whole | {"config": {"batch_size": 8}})
    with pytest.raises(WeightsError, match="holds the config of another model"):
        open_saved(tmp_path / "other.ckpt")
    assert same(open_saved(tmp_path / "other.ckpt", CONFIG).build(), model)


def test_names_of_a_compiled_model(tmp_path: Path) -> None:
    model = make_model(CONFIG)
    state = {f"model._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": state, "hyper_parameters": {"config": asdict(CONFIG)}}, tmp_path / "a.ckpt")
    assert same(open_saved(tmp_path / "a.ckpt").build(), model)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"state_dict": {"net.0.weight": torch.ones(2)}}, "its entries are state_dict"),
        ({"epoch": 1, "model": {"weight": torch.ones(2)}}, "its entries are epoch, model"),
        ([1, 2], "holds a list, and a checkpoint is a dictionary"),
        (
            {"model": {"embedding.token.weight": torch.ones(2, 2)}, "config": {"width": 3}},
            "the config of another model",
        ),
    ],
)
def test_what_is_no_gpt_is_refused(content: Any, said: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(WeightsError) as caught:
        open_saved(tmp_path / "a.ckpt")
    assert said in str(caught.value)


def test_another_model_is_told_how_to_get_its_weights(tmp_path: Path) -> None:
    content = {"state_dict": {"model.0.weight": torch.ones(2)}, "pytorch-lightning_version": "2.6.6"}
    torch.save(content, path := tmp_path / "my own.ckpt")
    with pytest.raises(WeightsError, match="asyncpp export takes checkpoints of GPTModule and HFModule") as caught:
        open_saved(path)
    said = re.search(r"asyncpp (checkpoint convert .* --to weights);", str(caught.value))
    assert said is not None
    words = [str(tmp_path / word) if word == "weights.safetensors" else word for word in shlex.split(said[1])]
    assert words[2] == str(path)
    main(words[1:])
    assert load_file(tmp_path / "weights.safetensors")["0.weight"].tolist() == [1.0, 1.0]


def test_weights_that_are_not_those_of_the_config(tmp_path: Path) -> None:
    state = make_model(CONFIG).state_dict()
    del state["head.norm.weight"]
    torch.save({"model": state, "config": asdict(replace(CONFIG, dim=64))}, tmp_path / "a.ckpt")
    with pytest.raises(WeightsError, match="does not hold the weights of its config") as caught:
        open_saved(tmp_path / "a.ckpt").build()
    assert "lacks: head.norm.weight" in str(caught.value)
    assert "embedding.token.weight has the shape (96, 32) instead of (96, 64)" in str(caught.value)
    assert "more" in str(caught.value)


def test_sizes_that_no_tensor_has(tmp_path: Path) -> None:
    content = {"model": GPT(CONFIG).state_dict(), "config": {**asdict(CONFIG), "vocab_size": 10**30}}
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(WeightsError, match="no model can be made of GPTConfig"):
        open_saved(tmp_path / "a.ckpt").check()


def test_layers_that_no_folder_has(tmp_path: Path) -> None:
    exported(CONFIG, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "num_hidden_layers": 10**9}))
    with pytest.raises(WeightsError, match="num_layers=1000000000, and the files have"):
        open_saved(tmp_path)


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    with pytest.raises(WeightsError, match=r"text is damaged or no checkpoint"):
        open_saved(tmp_path / "text")
    torch.save({"run": Code()}, tmp_path / "code")
    with pytest.raises(WeightsError, match="cannot be read without running code"):
        open_saved(tmp_path / "code")
    with pytest.raises(WeightsError, match="is no checkpoint, and no folder"):
        open_saved(tmp_path / "absent")
    with pytest.raises(WeightsError, match=r"folder without index\.json and config\.json"):
        open_saved(tmp_path)


class Code:
    """Whatever reads it with pickle runs it."""

    def __reduce__(self) -> Any:
        raise_it = 'raise AssertionError("code of a checkpoint ran")'
        return exec, (raise_it,)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "glm4-moe"])
def test_a_model_starts_from_saved_weights(name: str, tmp_path: Path) -> None:
    """Units on the meta device take theirs alone, when they are initialised; those with real weights at once."""
    config = CASES[name][1]
    model = exported(config, tmp_path / "out", seed=4)
    real = GPT(config)
    start_from(real, tmp_path / "out")
    assert same(real, model)
    with torch.device("meta"):
        lazy = GPT(config)
    start_from(lazy, tmp_path / "out")
    copied = copy.deepcopy(pickle.loads(pickle.dumps(lazy)))
    for each in (lazy, copied):
        assert all(parameter.is_meta for parameter in each.parameters())
        units = pipeline_units(each)
        materialize(units, [0, 2, len(units) - 1], 1, torch.device("cpu"))
        for index in (0, 2, len(units) - 1):
            assert same(units[index].module, pipeline_units(model)[index].module)
        assert all(parameter.is_meta for parameter in units[1].module.parameters())


def test_a_copy_of_a_started_model_is_its_own(tmp_path: Path) -> None:
    """Initialising the copy does not touch the first."""
    exported(CONFIG, tmp_path / "out")
    with torch.device("meta"):
        model = GPT(CONFIG)
    start_from(model, tmp_path / "out")
    copied = copy.deepcopy(model)
    materialize(pipeline_units(copied), [1], 1, torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(parameter.is_meta for parameter in copied.blocks[0].parameters())


def test_module_with_initial_weights(tmp_path: Path) -> None:
    """From a folder of transformers and from a checkpoint, with another context; a checkpoint does not need them."""
    model = exported(CONFIG, tmp_path / "out", seed=4)
    config = replace(CONFIG, context_length=16, dropout=0.1, init_std=0.02)
    module = GPTModule(config, initial_weights=str(tmp_path / "out"))
    module.configure_model()
    assert module.model is not None
    content = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    torch.save(content | {"pytorch-lightning_version": L.__version__}, tmp_path / "a.ckpt")
    again = GPTModule(config, initial_weights=str(tmp_path / "a.ckpt"))
    again.configure_model()
    for made in (module.model, again.model):
        state = made.state_dict()  # type: ignore[union-attr]
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    (tmp_path / "out").rename(tmp_path / "moved")
    loaded = GPTModule.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert same(loaded.model, module.model)  # type: ignore[arg-type]


def test_sizes_that_differ_are_refused_with_both_numbers(tmp_path: Path) -> None:
    exported(CASES["glm4-moe"][1], tmp_path / "out")
    moe = replace(CASES["glm4-moe"][1].moe, top_k=3, balance_loss=0.5)  # type: ignore[type-var]
    config = replace(CASES["glm4-moe"][1], num_layers=5, norm_eps=1e-6, context_length=8, moe=moe)
    with pytest.raises(ValueError, match="initial_weights=") as caught:
        GPTModule(config, initial_weights=str(tmp_path / "out"))
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 3
    for line, name, wanted, found in zip(lines, ("num_layers", "norm_eps", "moe.top_k"), (5, 1e-06, 3), (3, 2e-05, 2)):
        assert f"{name}={wanted!r}, and the weights are those of a model with {name}={found!r}" in line
    with pytest.raises(ValueError, match=r"(?s)initial_weights='/absent':.*is no checkpoint, and no folder"):
        GPTModule(config, initial_weights="/absent")


def test_missing_tensors_are_found_before_training(tmp_path: Path) -> None:
    state = make_model(CONFIG).state_dict()
    del state["blocks.1.attention.key.weight"]
    torch.save({"model": state, "config": asdict(CONFIG)}, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"lacks: blocks\.1\.attention\.key\.weight"):
        GPTModule(CONFIG, initial_weights=str(tmp_path / "a.ckpt"))

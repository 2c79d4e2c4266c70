"""Models can be opened from checkpoints of the Trainer and of Fabric, and can start from saved weights."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_asyncpp.core.cut.cutting import materialize
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.models import GPT, GPTConfig, WeightsError, open_saved, start_from
from lightning_asyncpp.trainer.gpt_module import GPTModule
from tests.helpers.models import CASES, exported, make_model, tokens_of
from tests.helpers.trainer import Net, Run, make_trainer
from tests.storage.saves import Evil

CONFIG = CASES["llama"][1]


def same(model: nn.Module, other: nn.Module) -> bool:
    """Return whether two models are bitwise equal, including buffers that are not in the ``state_dict``."""
    tensors, others = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (model, other))
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


def trained(folder: Path, config: GPTConfig = CONFIG) -> tuple[GPTModule, Path]:
    """Return a module after one update, and the path of its checkpoint."""
    L.seed_everything(0, verbose=False)
    module = GPTModule(config, warmup_steps=1)
    trainer = make_trainer(Run(Net, "plain"), default_root_dir=folder, max_steps=1, enable_checkpointing=True)
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
    network = fabric.setup_module(model)
    fabric.save(tmp_path / "whole.ckpt", {"network": network, "config": asdict(CONFIG), "tokenizer": "byte"})
    found = open_saved(tmp_path / "whole.ckpt")
    assert same(found.build(), model)
    assert found.tokenizer == "byte"
    fabric.save(tmp_path / "bare.ckpt", {"network": network, "step": 3})
    with pytest.raises(WeightsError, match=r"says nothing of the model\'s shape.*dataclasses\.asdict\(config\)"):
        open_saved(tmp_path / "bare.ckpt")


def state(**config: Any) -> dict[str, Any]:
    """Return a checkpoint; ``config`` adds or replaces entries of its config."""
    return {"model": make_model(CONFIG).state_dict(), "config": {**asdict(CONFIG), **config}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param({"state_dict": {"net.weight": torch.ones(2)}}, "its entries are state_dict", id="another model"),
        pytest.param([1, 2], "holds a list, and a checkpoint is a dictionary", id="no checkpoint"),
        pytest.param({"run": Evil(Path("unpickled"))}, "cannot be read without running code", id="code"),
        pytest.param(state(width=3), "the config of another model", id="another config"),
        pytest.param(state(dim=64), r"has the shape \(96, 32\) instead of \(96, 64\)", id="other sizes"),
        pytest.param(state(num_layers=4), "lacks: blocks.3", id="a layer is missing"),
        pytest.param(state(vocab_size=10**30), "no model can be made of GPTConfig", id="absurd sizes"),
    ],
)
def test_what_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(WeightsError, match=message):
        open_saved(tmp_path / "a.ckpt").check()


@pytest.mark.parametrize("name", ["llama", "llama-tied", "glm4-moe"])
def test_a_model_starts_from_saved_weights(name: str, tmp_path: Path) -> None:
    """Units on the meta device load only their own weights, when they are initialised; other units load at once."""
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


def test_sizes_that_differ_are_refused_with_both_numbers(tmp_path: Path) -> None:
    exported(CONFIG, tmp_path / "out")
    config = replace(CONFIG, num_layers=5, context_length=8)
    with pytest.raises(ValueError, match="num_layers=5, and the weights are those of a model with num_layers=3"):
        GPTModule(config, initial_weights=str(tmp_path / "out"))

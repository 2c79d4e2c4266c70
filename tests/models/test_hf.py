"""Models written to folders of transformers compute the same there, and are read back bit for bit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from lightning_asyncpp.models import GPTConfig, MoEConfig, WeightsError, open_saved
from lightning_asyncpp.models.architectures import ARCHITECTURES
from lightning_asyncpp.models.hf import read_hf, write_hf
from lightning_asyncpp.models.saved import TRAINING_ONLY, values_of
from tests.helpers.models import CASES, GLM, SHAPE, SOFTMAX, exported, make_model, saved, tokens_of

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers.logging.disable_progress_bar()
    transformers.logging.enable_propagation()  # so that caplog gets the messages
    yield
    transformers.logging.disable_propagation()
    transformers.logging.enable_progress_bar()


def load(folder: Path) -> Any:
    """Load a folder with transformers, and check that the files have exactly the tensors of the class."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_what_is_written_computes_the_same_and_is_read_bit_for_bit(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Logits agree within 1e-5 of the largest: angles of positions are in fp32 in transformers, and in fp64 here."""
    class_name, config = CASES[name]
    model, folder, tokens = make_model(config), tmp_path / "out", tokens_of(config)
    write_hf(saved(model), folder, max_shard_bytes=20_000)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(sizes) > 3
    assert max(sizes) < 22_000  # including the header
    with caplog.at_level(logging.WARNING):
        theirs = load(folder)
    assert not caplog.records
    assert (type(theirs).__name__, theirs.dtype) == (class_name, torch.float32)
    ours, logits = model(tokens), theirs(tokens).logits
    assert float(logits.std()) > 0.3
    assert float((ours - logits).abs().max()) <= 1e-5 * float(logits.abs().max())

    found, state = read_hf(folder), model.state_dict()
    found.check()
    assert found.shapes.keys() == state.keys() == set(found.tensors)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in state.items())
    unused = TRAINING_ONLY | ({"mlp_dim"} if name == "mixtral" else set())
    wanted, values = ({n: v for n, v in values_of(c).items() if n not in unused} for c in (config, found.config))
    assert values == wanted
    assert torch.equal(found.build()(tokens), ours)


SCORES_AS_THEY_ARE = GPTConfig(**SHAPE, moe=MoEConfig(**GLM, normalize_top_k=False))


@pytest.mark.parametrize("config", [*(config for _, config in CASES.values()), SCORES_AS_THEY_ARE])
def test_gradients_are_those_of_transformers(config: GPTConfig, tmp_path: Path) -> None:
    """Gradients equal those of transformers; ours are exported like weights to get the same names."""
    model, tokens = exported(config, tmp_path / "out"), tokens_of(config)
    theirs = load(tmp_path / "out")
    for logits in (model(tokens), theirs(tokens).logits):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)  # type: ignore[arg-type]
    write_hf(saved(model), tmp_path / "gradients")
    for found, parameter in zip(load(tmp_path / "gradients").parameters(), theirs.parameters(), strict=True):
        scale = float(parameter.grad.abs().max())
        assert scale > 1e-6
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-wide", "mixtral", "qwen3-moe", "glm4-moe"])
@torch.no_grad()
def test_a_model_that_transformers_made(name: str, tmp_path: Path) -> None:
    """A model that transformers initialised at random, and saved in shards, computes the same here."""
    exported(CASES[name][1], tmp_path / "ours")
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    config.initializer_range = 0.2
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    found = open_saved(tmp_path / "theirs")
    tokens = tokens_of(found.config)
    logits = theirs(tokens).logits
    assert float((found.build()(tokens) - logits).abs().max()) <= 1e-5 * float(logits.abs().max())


def test_dtype_of_the_files(tmp_path: Path) -> None:
    """Biases for the choice of experts stay in fp32, since their steps of 0.001 would be lost in bf16."""
    model = make_model(CASES["glm4-moe"][1])
    write_hf(saved(model), tmp_path / "out", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name, tensor in tensors.items() if tensor.dtype != torch.bfloat16} == {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)
    }
    assert load(tmp_path / "out").dtype == torch.bfloat16
    expected = model.state_dict()["head.weight"].bfloat16().float()
    assert torch.equal(read_hf(tmp_path / "out").tensors["head.weight"], expected)


@pytest.mark.parametrize(
    ("moe", "message"),
    [
        pytest.param(SOFTMAX | {"normalize_top_k": False}, "has moe.normalize_top_k=True only", id="another value"),
        pytest.param(GLM | {"num_shared_experts": 0}, "has a moe.num_shared_experts of at least 1", id="too little"),
    ],
)
def test_what_no_class_expresses_is_refused(moe: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no class of transformers computes what this model computes") as caught:
        write_hf(saved(make_model(GPTConfig(**SHAPE, moe=MoEConfig(**moe)))), tmp_path / "out")
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_defaults_are_those_of_the_classes() -> None:
    """Entries missing in a config.json have the same defaults as in the class of transformers."""
    for architecture in ARCHITECTURES:
        theirs = transformers.AutoConfig.for_model(architecture.model_type).to_dict()
        theirs |= theirs["rope_parameters"]
        known = architecture.defaults.keys() & theirs.keys()
        assert {key: theirs[key] for key in known} == {key: architecture.defaults[key] for key in known}
        assert known >= {"rms_norm_eps", "max_position_embeddings", "rope_theta", "hidden_act"}


def edited(folder: Path, **changes: Any) -> Path:
    """Change entries of a folder's config.json, where "removed" removes a key, and return the folder."""
    content = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: value for name, value in content.items() if value != "removed"}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2', but only these can be read: 'llama'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures=['LlamaForSequenceClassification']"),
        ({"hidden_act": "gelu", "attention_bias": True}, "'gelu': a GPT of this package supports only 'silu'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e3}}, "rope_type='llama3': a GPT of this package"),
        ({"rope_parameters": "removed", "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"quantization_config": {"bits": 4}}, "the weights are quantised"),
        ({"num_hidden_layers": 4}, "lacks: blocks.3.attention_norm.weight"),
        ({"num_hidden_layers": 2}, "has a tensor that the model lacks: model.layers.2."),
    ],
)
def test_what_is_no_gpt_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    exported(CASES["llama"][1], tmp_path / "out")
    with pytest.raises(WeightsError) as caught:
        read_hf(edited(tmp_path / "out", **changes)).check()
    assert message in str(caught.value)


def test_old_config_files(tmp_path: Path) -> None:
    """A config.json of transformers before release 5 can be read, also without entries that follow from others."""
    config = CASES["llama"][1]
    exported(config, tmp_path / "out")
    edited(
        tmp_path / "out", rope_parameters="removed", head_dim=None, num_key_value_heads=None, dtype="removed",
        rope_scaling=None, tie_word_embeddings="removed", partial_rotary_factor="removed",
    )  # fmt: skip
    assert replace(read_hf(tmp_path / "out").config, num_kv_heads=None) == replace(config, num_kv_heads=None)


def without_a_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.block_sparse_moe.experts.3.w1.weight"]
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda f: (f / "config.json").write_text("{"), r"config\.json cannot be read", id="no config"),
        pytest.param(lambda f: (f / "model.safetensors").unlink(), "has neither", id="no weights"),
        pytest.param(lambda f: (f / "model.safetensors").write_bytes(b"x" * 9), "is damaged", id="cut off"),
        pytest.param(without_a_tensor, r"lacks: blocks\.1\.mlp\.experts\.gate$", id="an expert is missing"),
    ],
)
def test_a_damaged_folder(damage: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    exported(CASES["mixtral"][1], tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises(WeightsError, match=message):
        read_hf(tmp_path / "out").check()


def test_a_copy_of_a_tied_matrix_is_not_looked_at(tmp_path: Path) -> None:
    model = exported(CASES["llama-tied"][1], tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": torch.zeros(96, 32)}, path)
    found = read_hf(tmp_path / "out")
    found.check()
    assert torch.equal(found.tensors["head.weight"], model.head.weight)
    assert found.build().head.weight.shape == model.head.weight.shape

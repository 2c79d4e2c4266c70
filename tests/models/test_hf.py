"""Folders of transformers: what is written there computes the same, and what is read comes back bit for bit."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lightning_asyncpp.models import GPTConfig, MoEConfig, WeightsError, open_saved
from lightning_asyncpp.models.architectures import ARCHITECTURES
from lightning_asyncpp.models.hf import architecture_of, config_from_json, read_hf, write_hf
from lightning_asyncpp.models.saved import TRAINING_ONLY, values_of
from tests.helpers.hf_cases import CASES, GLM, SHAPE, SOFTMAX, exported, make_model, saved, tokens_of

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers.logging.disable_progress_bar()
    transformers.logging.enable_propagation()  # to caplog
    yield
    transformers.logging.disable_propagation()
    transformers.logging.enable_progress_bar()


def load(folder: Path) -> Any:
    """As a user would; every tensor of the class must be in the files, and nothing else."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_transformers_computes_the_same(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Within 1e-5 of the largest logit: transformers takes the angles of the positions in fp32, we in fp64."""
    class_name, config = CASES[name]
    model = exported(config, tmp_path / "out")
    with caplog.at_level(logging.WARNING):
        theirs = load(tmp_path / "out")
    assert not caplog.records
    assert type(theirs).__name__ == class_name
    assert theirs.dtype == torch.float32
    assert sum(p.numel() for p in theirs.parameters()) == config.num_parameters()
    tokens = tokens_of(config)
    ours, logits = model(tokens), theirs(tokens).logits
    assert float(logits.std()) > 0.3
    assert float((ours - logits).abs().max()) <= 1e-5 * float(logits.abs().max())


@torch.no_grad()
def test_only_the_angles_differ(tmp_path: Path) -> None:
    """With our angles in their model, the logits of a dense model are the same bit for bit."""
    config = CASES["llama-grouped"][1]
    model = exported(config, tmp_path / "out")
    theirs = load(tmp_path / "out")
    rotary = model.blocks[0].attention.rotary  # type: ignore[union-attr]
    tables = [torch.cat((table, table), dim=-1)[None] for table in (rotary.cos, rotary.sin)]  # type: ignore[arg-type]
    theirs.model.rotary_emb.forward = lambda x, position_ids: tables
    tokens = tokens_of(config)
    assert torch.equal(model(tokens), theirs(tokens).logits)


@pytest.mark.parametrize("name", CASES)
def test_what_was_written_is_read_bit_for_bit(name: str, tmp_path: Path) -> None:
    config = CASES[name][1]
    model = make_model(config)
    write_hf(saved(model), tmp_path / "out", max_shard_bytes=20_000)
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) > 3
    assert max(sizes) < 22_000  # with the header
    found = read_hf(tmp_path / "out")
    found.check()
    state = model.state_dict()
    assert found.shapes.keys() == state.keys() == set(found.tensors)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in state.items())
    assert all(found.tensors[name].dtype == torch.float32 for name in state)
    wanted, values = values_of(config), values_of(found.config)
    unused = TRAINING_ONLY | ({"mlp_dim"} if name == "mixtral" else set())
    assert {n: v for n, v in values.items() if n not in unused} == {n: v for n, v in wanted.items() if n not in unused}
    assert torch.equal(found.build()(tokens_of(config)), model(tokens_of(config)))


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-wide", "mixtral", "qwen3-moe", "glm4-moe", "glm4-moe-wide"])
@torch.no_grad()
def test_a_model_that_transformers_made(name: str, tmp_path: Path) -> None:
    """Its own random weights, in files that it wrote, sharded."""
    exported(CASES[name][1], tmp_path / "ours")
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    config.initializer_range = 0.2
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    size = "40KB" if name == "glm4-moe" else "5GB"
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) == (1 if size == "5GB" else 7)
    found = open_saved(tmp_path / "theirs")
    tokens = tokens_of(found.config)
    logits = theirs(tokens).logits
    assert float((found.build()(tokens) - logits).abs().max()) <= 1e-5 * float(logits.abs().max())


def test_published_names_of_experts(tmp_path: Path) -> None:
    """Other programs read the files, too: an expert's matrices are separate there, under their first names."""
    exported(CASES["mixtral"][1], tmp_path / "mixtral")
    exported(CASES["glm4-moe"][1], tmp_path / "glm")
    with safe_open(tmp_path / "mixtral" / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert file.metadata() == {"format": "pt"}
        assert file.get_slice("model.layers.2.block_sparse_moe.experts.4.w2.weight").get_shape() == [32, 24]
    experts = {f"experts.{e}.w{w}" for e in range(5) for w in (1, 2, 3)}
    assert {f"model.layers.1.block_sparse_moe.{n}.weight" for n in (*experts, "gate")} <= names
    with safe_open(tmp_path / "glm" / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    mlp = "model.layers.1.mlp"
    assert {f"{mlp}.experts.0.gate_proj.weight", f"{mlp}.gate.weight", f"{mlp}.gate.e_score_correction_bias"} <= names
    assert {f"{mlp}.shared_experts.up_proj.weight", "model.layers.0.mlp.down_proj.weight"} <= names


def test_dtype_of_the_files(tmp_path: Path) -> None:
    """Biases that choose experts stay in fp32: in bf16 their steps of 0.001 would be lost."""
    model = make_model(CASES["glm4-moe"][1])
    write_hf(saved(model), tmp_path / "out", dtype=torch.bfloat16)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        dtypes = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert {name for name, dtype in dtypes.items() if dtype != torch.bfloat16} == {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)
    }
    assert load(tmp_path / "out").dtype == torch.bfloat16
    mixed = {name: tensor.bfloat16() if "norm" not in name else tensor for name, tensor in model.state_dict().items()}
    write_hf(replace(saved(model), tensors=mixed), tmp_path / "mixed")
    assert load(tmp_path / "mixed").dtype == torch.float32
    found = read_hf(tmp_path / "out")
    expected = model.state_dict()["head.weight"].bfloat16().float()
    assert torch.equal(found.tensors["head.weight"], expected)


@pytest.mark.parametrize(
    ("moe", "said"),
    [
        (SOFTMAX | {"num_shared_experts": 1}, "MixtralForCausalLM has moe.num_shared_experts=0 only, and the model 1"),
        (SOFTMAX | {"num_dense_layers": 1}, "MixtralForCausalLM has moe.num_dense_layers=0 only, and the model 1"),
        (SOFTMAX | {"normalize_top_k": False}, "MixtralForCausalLM has moe.normalize_top_k=True only"),
        (GLM | {"every": 2}, "Glm4MoeForCausalLM has moe.every=1 only, and the model 2"),
        (GLM | {"num_shared_experts": 0}, "has a moe.num_shared_experts of at least 1, and the model 0"),
    ],
)
def test_what_no_class_expresses_is_refused(moe: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = make_model(GPTConfig(**SHAPE, moe=MoEConfig(**moe)))
    with pytest.raises(WeightsError, match="no class of transformers computes what this model computes") as caught:
        write_hf(saved(model), tmp_path / "out")
    assert said in str(caught.value)
    assert "LlamaForCausalLM has no experts, and the model has" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_every_value_of_a_config_is_accounted_for() -> None:
    """A field that is new in GPTConfig is in a table, or every export is refused until it is."""
    moe = GPTConfig(**SHAPE, moe=MoEConfig(**GLM))
    for config in (GPTConfig(**SHAPE), GPTConfig(**SHAPE, qk_norm=True), moe):
        for architecture in ARCHITECTURES:
            known = {*architecture.values, *architecture.required, *TRAINING_ONLY, *architecture.unused, "moe"}
            if ("moe.top_k" in architecture.values) == (config.moe is not None):
                assert values_of(config).keys() <= known

    @dataclass
    class Wider(GPTConfig):
        window: int = 0

    with pytest.raises(WeightsError, match="LlamaForCausalLM does not know window=0"):
        architecture_of(Wider(**SHAPE))


def test_defaults_are_those_of_the_classes() -> None:
    """What a config.json leaves out is what the class of transformers takes."""
    for architecture in ARCHITECTURES:
        theirs = transformers.AutoConfig.for_model(architecture.model_type).to_dict()
        theirs |= theirs["rope_parameters"]
        known = architecture.defaults.keys() & theirs.keys()
        assert {key: theirs[key] for key in known} == {key: architecture.defaults[key] for key in known}
        assert known >= {"rms_norm_eps", "max_position_embeddings", "rope_theta", "hidden_act"}


def edited(folder: Path, **changes: Any) -> Path:
    """The config.json of a folder, changed; ``None`` removes a key."""
    content = json.loads((folder / "config.json").read_text())
    content |= changes
    kept = {name: value for name, value in content.items() if value != "removed"}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2', and these can be read: 'llama'"),
        ({"model_type": ["llama"]}, "and these can be read: 'llama'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures=['LlamaForSequenceClassification']"),
        ({"architectures": 1}, "architectures=1, and these can be read: 'llama'"),
        ({"attention_bias": True}, "attention_bias=True: a GPT has False only"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': a GPT has 'silu' only"),
        ({"head_dim": 16}, "blocks.0.attention.query.weight has the shape (32, 32) instead of (64, 32)"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": "removed"}, "partial_rotary_factor=0.5: a GPT has 1.0 only"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e3}}, "rope_type='llama3': a GPT has 'default'"),
        ({"rope_parameters": "removed", "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"rope_parameters": "linear"}, "rope_type='linear'"),
        ({"rope_parameters": {"full": {"rope_theta": 5e3}}}, "rope_type='another for every type of layer'"),
        ({"quantization_config": {"bits": 4}}, "the weights are quantised"),
        ({"hidden_size": "removed"}, "hidden_size: is missing"),
        ({"num_attention_heads": 5, "head_dim": None}, "num_heads=5: must divide dim=32"),
        ({"num_hidden_layers": 4}, "lacks: blocks.3.attention_norm.weight"),
        ({"num_hidden_layers": 2}, "holds what the model has not: model.layers.2."),
        ({"intermediate_size": 64}, "blocks.0.mlp.gate.weight has the shape (56, 32) instead of (64, 32)"),
    ],
)
def test_what_is_no_gpt_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    exported(CASES["llama"][1], tmp_path / "out")
    with pytest.raises(WeightsError) as caught:
        read_hf(edited(tmp_path / "out", **changes)).check()
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_old_config_files(tmp_path: Path) -> None:
    """As releases before 5 wrote them, with what follows from other values left out."""
    config = CASES["llama"][1]
    exported(config, tmp_path / "out")
    edited(
        tmp_path / "out", rope_parameters="removed", head_dim=None, num_key_value_heads=None, dtype="removed",
        rope_scaling=None, tie_word_embeddings="removed", partial_rotary_factor="removed",
    )  # fmt: skip
    assert replace(read_hf(tmp_path / "out").config, num_kv_heads=None) == replace(config, num_kv_heads=None)


GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944,
    "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
    "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False,
    "vocab_size": 151552,
}  # fmt: skip


def test_the_sizes_of_a_published_glm() -> None:
    """Those that it is known by, with what no GPT has changed."""
    plain = {"attention_bias": False, "partial_rotary_factor": 1.0, "num_nextn_predict_layers": 0}
    config, _ = config_from_json(GLM_4_5_AIR | plain)
    assert config.num_parameters() == pytest.approx(106e9, rel=0.01)
    embeddings = 2 * config.vocab_size * config.dim
    assert config.num_active_parameters() - embeddings == pytest.approx(12e9, rel=0.02)


def test_what_glm_says_that_no_gpt_is() -> None:
    """Groups of experts, another rotation, biases and further layers, by name and value."""
    changes = {"n_group": 2, "topk_group": 2, "rope_scaling": {"type": "yarn", "factor": 2.0}, "hidden_act": "gelu"}
    with pytest.raises(WeightsError, match="a Glm4MoeForCausalLM that no GPT is") as caught:
        config_from_json(GLM_4_5_AIR | changes)
    for named in (
        "n_group=2", "topk_group=2", "rope_type='yarn'", "hidden_act='gelu'", "attention_bias=True",
        "partial_rotary_factor=0.5", "num_nextn_predict_layers=1",
    ):  # fmt: skip
        assert f"{named}: a GPT has" in str(caught.value)


def test_damaged_folders(tmp_path: Path) -> None:
    def written(name: str) -> Path:
        write_hf(saved(make_model(CASES["llama"][1])), tmp_path / name, max_shard_bytes=20_000)
        return tmp_path / name

    folder = written("shard")
    next(folder.glob("*-00002-*")).unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-\d+\.safetensors, which .* lists, cannot be found"):
        read_hf(folder)
    folder = written("cut")
    shard = next(folder.glob("*-00001-*"))
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(WeightsError, match="is damaged, or no safetensors file"):
        read_hf(folder)
    (written("json") / "config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"config\.json cannot be read, or is not"):
        read_hf(tmp_path / "json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match=r"config\.json cannot be read"):
        read_hf(tmp_path / "empty")
    exported(CASES["llama"][1], tmp_path / "none")
    (tmp_path / "none" / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"has neither model\.safetensors nor"):
        read_hf(tmp_path / "none")


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    exported(CASES["mixtral"][1], tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del tensors["model.layers.1.block_sparse_moe.experts.3.w1.weight"]
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=r"lacks: blocks\.1\.mlp\.experts\.gate$"):
        read_hf(tmp_path / "out").check()


def test_a_copy_of_a_tied_matrix_is_not_looked_at(tmp_path: Path) -> None:
    config = CASES["llama-tied"][1]
    model = exported(config, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert "lm_head.weight" not in tensors
    tables = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors | tables | {"lm_head.weight": torch.zeros(96, 32)}, path)
    found = read_hf(tmp_path / "out")
    found.check()
    assert torch.equal(found.tensors["head.weight"], model.head.weight)
    built = found.build()
    assert built.head.weight is built.embedding.token.weight


def test_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    model = saved(make_model(CASES["llama-tied"][1]))
    with pytest.raises(WeightsError, match="used exists already"):
        write_hf(model, tmp_path / "used")
    shapes = {name: shape for name, shape in model.shapes.items() if name != "head.norm.weight"}
    with pytest.raises(WeightsError, match=r"lacks: head\.norm\.weight"):
        write_hf(replace(model, shapes=shapes), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["used"]

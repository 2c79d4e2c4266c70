"""HFModule: pipelines equal the oracle, gradients are those of the mean over tokens, mistakes are told before."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lightning_asyncpp import ConfigurationError, HFModule, check_model
from lightning_asyncpp.optim import MuonAdamW
from tests.helpers.hf_folders import make_folder, padded_batches
from tests.helpers.oracle import assert_equal_weights, joined_parts
from tests.helpers.pool import Pools
from tests.trainer.hf.runs import Training, by_oracle, fit

LORA = {"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}
CLASSIFIER = {"task": "AutoModelForSequenceClassification", "config_overrides": {"num_labels": 3, "pad_token_id": 0}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "llama", tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "arguments"),
    [
        ("async", "feedback", {}),
        ("sync", "adamw", {"gradient_checkpointing": True}),
        ("async", "muon", {"lora": LORA}),
        ("async", "feedback", {"freeze": ["model.embed_tokens.*", "model.layers.[01].*"]}),
        ("async", "adamw", {"pretrained": False}),
    ],
    ids=["feedback", "sync-checkpointing", "lora", "a stage that trains nothing", "from scratch"],
)
def test_two_stages_equal_the_oracle_on_padded_batches(
    pools: Pools, llama: Path, strategy: str, optimizer: str, arguments: dict[str, Any]
) -> None:
    training = Training(str(llama), strategy, optimizer, arguments)
    results = pools.run(2, fit, training)
    expected = by_oracle(training)
    assert_equal_weights(of_stages(results), expected)
    untrained = training.module()
    torch.manual_seed(5)
    untrained.configure_model()
    assert untrained.model is not None
    for name, parameter in untrained.named_parameters():
        assert parameter.requires_grad or torch.equal(parameter.data, torch.from_numpy(expected[name])), name


def of_stages(results: list[dict[str, Any]]) -> dict[str, Any]:
    """All weights; the matrix that both stages hold is the same on both, under its first name."""
    return joined_parts(results)


@pytest.mark.parametrize(
    ("kind", "head", "config", "arguments"),
    [
        ("Llama", "ForCausalLM", {}, {}),
        ("Llama", "ForCausalLM", {}, CLASSIFIER),
        ("Bert", "ForMaskedLM", {}, {"task": "AutoModelForMaskedLM"}),
        (
            "T5", "ForConditionalGeneration",
            {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8, "decoder_start_token_id": 0},
            {"task": "AutoModelForSeq2SeqLM"},
        ),
        ("Mixtral", "ForCausalLM", {"num_local_experts": 4}, {}),
    ],
    ids=["causal", "classifier", "masked", "seq2seq", "experts"],
)  # fmt: skip
def test_microbatches_have_the_gradient_of_the_whole_batch(
    tmp_path: Path, kind: str, head: str, config: dict[str, Any], arguments: dict[str, Any]
) -> None:
    module = HFModule(str(make_folder(tmp_path / "m", kind, head, **config)), decay="constant", **arguments)
    batches = padded_batches(2)
    if arguments == CLASSIFIER:
        batches = [{**batch, "labels": torch.arange(4) % 3} for batch in batches]
    report = check_model(module, batches, stages=2, microbatches=2, updates=2)
    assert report.ok, str(report)
    assert "to the last bit" in str(report)


def test_the_loss_is_the_models_own(llama: Path) -> None:
    """Over all targets of a batch; and a part of it without any is 0."""
    module = HFModule(str(llama), decay="constant")
    module.configure_model()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign, assignment]
    (batch,) = padded_batches(1)
    own = transformers.AutoModelForCausalLM.from_pretrained(llama)(**batch).loss
    torch.testing.assert_close(module.training_step(batch, 0), own)
    assert module.microbatch_weight(batch) == float((batch["labels"][:, 1:] != -100).sum())
    tokens = batch["labels"]
    torch.testing.assert_close(module.training_step(tokens, 0), own)
    assert module.microbatch_weight(tokens) == module.microbatch_weight(batch)
    empty = {**batch, "labels": torch.full_like(tokens, -100)}
    assert module.training_step(empty, 0) == 0
    assert module.microbatch_weight(empty) == 0


def test_muon_takes_the_matrices_of_the_blocks_alone(llama: Path) -> None:
    module = HFModule(str(llama), decay="constant", freeze=["model.layers.0.*"])
    module.configure_model()
    optimizer = module.configure_optimizers()["optimizer"]  # type: ignore[index, call-overload]
    assert isinstance(optimizer, MuonAdamW)
    (group,) = optimizer.param_groups
    for p in group["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    of_parameter = dict(zip(group["param_names"], (optimizer.state[p] for p in group["params"])))
    matrices = [name for name, state in of_parameter.items() if "momentum_buffer" in state]
    assert all(re.fullmatch(r"model\.layers\.[12]\..*_proj\.weight", name) for name in matrices)
    assert len(matrices) == 14
    assert "model.embed_tokens.weight" in of_parameter
    assert not any("layers.0" in name for name in of_parameter)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_id": "no/such/folder"}, "is no file or folder here"),
        ({"model_id": "nobody/nothing"}, "the Hugging Face Hub gives no config.json of it"),
        ({"task": "AutoModelForSeq2SeqLM"}, "Unrecognized configuration class"),
        ({"lora": {"rank": 2}}, "argument 'rank'"),
        ({"lora": {"r": 2, "target_modules": ["nothing"]}}, "Target modules"),
        ({"freeze": ["embed"]}, "no parameter fits 'embed'"),
        ({"freeze": ["*"]}, "leaves nothing to train"),
        ({"config_overrides": {"size": 3}}, "LlamaConfig has no size"),
        (
            {"config_overrides": {"hidden_size": 64}},
            "or some of other shapes, for lm_head|or some of other shapes, for model",
        ),
        ({"config_overrides": {"output_router_logits": True}}, "has no output_router_logits"),
        ({"config_overrides": {"num_hidden_layers": 4}}, "has no weights, or some of other shapes"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(llama: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HFModule(**{"model_id": str(llama), **arguments}).configure_model()


def test_losses_of_routers_are_refused(tmp_path: Path) -> None:
    folder = str(make_folder(tmp_path / "m", "Mixtral", num_local_experts=4, output_router_logits=True))
    with pytest.raises(ConfigurationError, match=r"config_overrides=.*'output_router_logits': False"):
        HFModule(folder)
    HFModule(folder, config_overrides={"output_router_logits": False}).configure_model()


def test_batches_without_labels_are_refused(llama: Path) -> None:
    with pytest.raises(ConfigurationError, match="gives a dict with input_ids"):
        HFModule(str(llama)).microbatch_weight({"input_ids": torch.ones(2, 3, dtype=torch.int64)})


def test_without_transformers_the_package_that_lacks_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install \"lightning-asyncpp\[hf\]\""):
        HFModule(str(llama))

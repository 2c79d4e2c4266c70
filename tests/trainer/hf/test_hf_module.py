"""HFModule trains alike with one or more stages, averages gradients over tokens, and reports mistakes early."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from lightning_asyncpp import ConfigurationError, HFModule
from lightning_asyncpp.core.microbatch import split_batch
from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW
from tests.helpers.models import make_folder, padded_batches
from tests.helpers.oracle import assert_equal_weights, joined_parts
from tests.helpers.trainer import Run, arrays, make_trainer

SEED, UPDATES = 5, 3
MUON = partial(MuonAdamW, lr=0.02, weight_decay=0.05)
LORA = {"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}
CLASSIFIER = {"task": "AutoModelForSequenceClassification", "config_overrides": {"num_labels": 3, "pad_token_id": 0}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "llama", tie_word_embeddings=True)


def made(folder: Path, **arguments: Any) -> HFModule:
    return HFModule(str(folder), **{"decay": "constant", "optimizer": partial(ErrorFeedback, base=MUON), **arguments})


def fit(folder: Path, arguments: dict[str, Any], stages: int) -> dict[str, np.ndarray]:
    """Train over processes (``stages=0``) or with all stages in this process, and return this rank's weights."""
    L.seed_everything(SEED, verbose=False)
    module = made(folder, **arguments)
    how = ("delayed", {"stages": stages, "staleness": "uniform"}) if stages else ("async", {})
    run = Run(HFModule, how[0], {"microbatches": 4, **how[1]})  # type: ignore[arg-type]
    make_trainer(run).fit(module, DataLoader(padded_batches(UPDATES), batch_size=None))
    return arrays(dict(module.named_parameters()))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"gradient_checkpointing": True, "pretrained": False}, id="checkpointing, from scratch"),
        pytest.param({"freeze": ["model.embed_tokens.*", "model.layers.[01].*"]}, id="a stage that trains nothing"),
    ],
)
def test_stages_train_as_one_on_padded_batches(llama: Path, arguments: dict[str, Any]) -> None:
    check_equal_to_one([fit(llama, arguments, 2)], llama, arguments)


def check_equal_to_one(results: list[dict[str, np.ndarray]], llama: Path, arguments: dict[str, Any]) -> None:
    """Check that stages train as one: a shared matrix is equal on both, under its first name; frozen weights stay."""
    expected = fit(llama, arguments, 1)
    assert_equal_weights(joined_parts(results), expected)
    torch.manual_seed(SEED)
    untrained = made(llama, **arguments)
    untrained.configure_model()
    for name, parameter in untrained.named_parameters():
        assert parameter.requires_grad or torch.equal(parameter.data, torch.from_numpy(expected[name])), name


T5 = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8, "decoder_start_token_id": 0}


@pytest.mark.parametrize(
    ("kind", "head", "config", "arguments"),
    [
        pytest.param("Llama", "ForCausalLM", {}, {}, id="causal"),
        pytest.param("Llama", "ForCausalLM", {}, CLASSIFIER, id="classifier"),
        pytest.param("Bert", "ForMaskedLM", {}, {"task": "AutoModelForMaskedLM"}, id="masked"),
        pytest.param("T5", "ForConditionalGeneration", T5, {"task": "AutoModelForSeq2SeqLM"}, id="seq2seq"),
    ],
)
def test_microbatches_have_the_gradient_of_the_whole_batch(
    tmp_path: Path, kind: str, head: str, config: dict[str, Any], arguments: dict[str, Any]
) -> None:
    """The gradient does not depend on how targets are distributed over microbatches, and padding does not count."""
    module = made(make_folder(tmp_path / "m", kind, head, **config), **arguments)
    module.configure_model()
    module.eval()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign, assignment]
    (batch,) = padded_batches(1)
    if arguments == CLASSIFIER:
        batch["labels"] = torch.arange(4) % 3
    parts = split_batch(batch, 2)
    weights = [module.microbatch_weight(part) for part in parts]
    assert sum(weights) == module.microbatch_weight(batch)
    whole = module.training_step(batch, 0)
    mean = sum(weight * module.training_step(part, 0) for weight, part in zip(weights, parts)) / sum(weights)
    torch.testing.assert_close(mean, whole)
    trained = [p for p in module.parameters() if p.requires_grad]
    for a, b in zip(torch.autograd.grad(mean, trained), torch.autograd.grad(whole, trained)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_models_own(llama: Path) -> None:
    """The loss is the model's own over all targets of a batch; without targets, the loss and its weight are 0."""
    module = made(llama)
    module.configure_model()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign, assignment]
    (batch,) = padded_batches(1)
    own = transformers.AutoModelForCausalLM.from_pretrained(llama)(**batch).loss
    torch.testing.assert_close(module.training_step(batch, 0), own)
    assert module.microbatch_weight(batch) == float((batch["labels"][:, 1:] != -100).sum())
    torch.testing.assert_close(module.training_step(batch["labels"], 0), own)
    assert module.microbatch_weight(batch["labels"]) == module.microbatch_weight(batch)
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    assert (module.training_step(empty, 0), module.microbatch_weight(empty)) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_id": "nobody/nothing"}, "the Hugging Face Hub gives no config.json of it"),
        ({"lora": {"r": 2, "target_modules": ["nothing"]}}, "Target modules"),
        ({"freeze": ["embed"]}, "no parameter matches 'embed'"),
        ({"freeze": ["*"]}, "leaves nothing to train"),
        ({"config_overrides": {"size": 3}}, "LlamaConfig has no size"),
        ({"config_overrides": {"num_hidden_layers": 4}}, "has no weights of the right shapes"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(llama: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HFModule(**{"model_id": str(llama), **arguments}).configure_model()


def test_losses_of_routers_are_refused(tmp_path: Path) -> None:
    folder = str(make_folder(tmp_path / "m", "Mixtral", num_local_experts=4, output_router_logits=True))
    with pytest.raises(ConfigurationError, match=r"config_overrides=.*'output_router_logits': False"):
        HFModule(folder)

"""Text sampled while a model is trained over stages: that of the whole model, and training does not notice."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from litdata import TokensLoader
from litdata.streaming import Cache
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_asyncpp import ConfigurationError, GPTModule, SampleText
from lightning_asyncpp.data import ByteTokenizer, DataError, TextDataModule
from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.models.sampling import Sampling, generate_tokens, logits_of
from tests.helpers.modules import small_gpt
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, fit, make_trainer

CONFIG = GPTConfig(vocab_size=32, context_length=8, num_layers=3, dim=16, num_heads=2, mlp_dim=32, init_std=0.2)
PROMPTS = ["\x01\x02\x03", ""]
SAMPLING = Sampling(0.9, top_k=20, seed=4)


class Kept(SampleText):
    """Keeps the texts of every validation, on every rank."""

    def __init__(self) -> None:
        super().__init__(PROMPTS, 12, SAMPLING.temperature, SAMPLING.top_k, seed=SAMPLING.seed, tokenizer="byte")
        self.texts: list[list[str]] = []
        self.weights: list[dict[str, Any]] = []

    def _continued(self, trainer: L.Trainer, module: GPTModule, *args: Any) -> str:
        text = super()._continued(trainer, module, *args)
        self.texts.append([text])
        if len(self.texts) % len(PROMPTS) == 0:
            state = trainer.strategy.lightning_module_state_dict()
            self.weights.append({name: tensor.clone() for name, tensor in state.items()})
        return text


def sampled(run: Run) -> tuple[list[list[str]], list[dict[str, np.ndarray]], dict[str, Any]]:
    """The texts, the weights that they are of, and what the run came to."""
    kept = Kept()
    result = fit(replace(run, callbacks=((lambda: kept, {}),)))
    weights = [{name: tensor.numpy() for name, tensor in state.items()} for state in kept.weights]
    return kept.texts, weights, result["weights"]


def texts_of(weights: dict[str, np.ndarray]) -> list[list[str]]:
    """What the whole model writes, in this process."""
    model = GPT(CONFIG).eval()
    model.load_state_dict({name.removeprefix("model."): torch.from_numpy(array) for name, array in weights.items()})
    tokenizer = ByteTokenizer()
    texts = []
    for prompt in PROMPTS:
        start = list(prompt.encode()) or [0]
        tokens = generate_tokens(logits_of(model), start, CONFIG.context_length, 12, SAMPLING, end=0)
        texts.append([prompt + tokenizer.decode(torch.tensor([t for t in tokens if t], dtype=torch.int64))])
    return texts


def run_of(strategy: str = "async", **trainer: Any) -> Run:
    return Run(
        partial(small_gpt, init_std=0.2), strategy, dataset="tokens", val_samples=(8,), samples=32,
        trainer={"val_check_interval": 2, "num_sanity_val_steps": 1} | trainer,
    )  # fmt: skip


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_whole_model_writes(pools: Pools, stages: int) -> None:
    run = run_of()
    results = pools.run(stages, sampled, run)
    texts, weights, _ = results[0]
    assert len(weights) == 2  # not in the check before training
    assert texts == [text for state in weights for text in texts_of(state)]
    assert texts[:2] != texts[2:]
    assert all(result[0] == texts for result in results)
    without = pools.run(stages, fit, run)
    for result, expected in zip(results, without):
        assert all(np.array_equal(result[2][name], array) for name, array in expected["weights"].items())


def test_other_strategies(pools: Pools) -> None:
    ((texts, weights, _),) = pools.run(1, sampled, run_of("plain"))
    assert texts == [text for state in weights for text in texts_of(state)]


def logged_by(run: Run) -> None:
    """With a TensorBoard logger."""
    fit(replace(run, callbacks=((SampleText, {"prompts": PROMPTS, "tokenizer": "byte", "max_new_tokens": 12}),)))


def test_in_tensorboard(pools: Pools, tmp_path: Path) -> None:
    run = run_of(logger="files", default_root_dir=str(tmp_path))
    pools.run(2, logged_by, replace(run, trainer=run.trainer | {"val_check_interval": 4}))
    (events,) = tmp_path.glob("**/events.out.tfevents.*")
    found = EventAccumulator(str(events.parent))
    found.Reload()
    tags = found.Tags()["tensors"]
    assert {"sample_0/text_summary", "sample_1/text_summary"} <= set(tags)
    (event,) = found.Tensors("sample_0/text_summary")
    assert event.step == 4
    assert event.tensor_proto.string_val[0].startswith(b"    \x01\x02\x03")


def test_what_cannot_be_sampled_from_is_refused() -> None:
    run = Run(Net, "plain")
    trainer = make_trainer(run, callbacks=[SampleText()])
    with pytest.raises(ConfigurationError, match=r"(?s)samples from a GPTModule, not from a Net.*knows no tokenizer"):
        trainer.fit(Net(run))
    with pytest.raises(ValueError, match=r"max_new_tokens=0"):
        SampleText(max_new_tokens=0)
    with pytest.raises(ValueError, match=r"top_p=2"):
        SampleText(top_p=2.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tokenizer": "absent.json"}, "absent.json"),
        ({}, "knows no tokenizer"),
    ],
)
def test_a_tokenizer_that_is_not_there(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Before training starts; tokens that somebody else wrote do not say whose they are."""
    cache = Cache(str(tmp_path / "tokens"), chunk_bytes=2**12, item_loader=TokensLoader())
    cache[0] = torch.arange(90, dtype=torch.int32) % 32
    cache.done()
    cache.merge()
    data = TextDataModule(str(tmp_path / "tokens"), context_length=8, batch_size=2, num_workers=0)
    run = run_of("plain")
    trainer = make_trainer(run, callbacks=[SampleText(**options)])
    with pytest.raises((ConfigurationError, DataError)) as caught:
        trainer.fit(small_gpt(run), datamodule=data)
    assert said in str(caught.value)


def test_tokenizer_of_the_data(tmp_path: Path) -> None:
    """A trained one too; an empty prompt is the beginning of a document."""
    (tmp_path / "text").mkdir()
    for index in range(8):
        (tmp_path / "text" / f"{index}.txt").write_text(f"number {index} and {index * index} " * 60)
    data = TextDataModule(
        str(tmp_path / "text"), "bpe", 280, context_length=16, batch_size=2, val_fraction=0.2,
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    callback = SampleText(["number 3"], max_new_tokens=5)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=2, limit_val_batches=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
    )  # fmt: skip
    module = GPTModule(GPTConfig(vocab_size=280, context_length=16, num_layers=1, dim=16, num_heads=2))
    trainer.fit(module, datamodule=data)
    assert 256 < callback._tokenizer(trainer).vocab_size <= 280
    text = callback._continued(trainer, module, data.tokenizer, "number 3")
    assert text.startswith("number 3")
    assert len(text) > len("number 3")

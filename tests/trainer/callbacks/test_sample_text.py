"""Text that is sampled during training over stages is that of the whole model, and does not affect training."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_asyncpp import ConfigurationError, GPTModule, SampleText
from lightning_asyncpp.data import ByteTokenizer, TextDataModule
from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.models.sampling import Sampling, generate_tokens, logits_of
from tests.helpers.models import write_texts
from tests.helpers.modules import small_gpt
from tests.helpers.oracle import assert_equal_weights
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, fit, make_trainer, staged, train

CONFIG = GPTConfig(vocab_size=32, context_length=8, num_layers=3, dim=16, num_heads=2, mlp_dim=32, init_std=0.2)
PROMPTS = ["\x01\x02\x03", ""]
SAMPLING = Sampling(0.9, top_k=20, seed=4)


class Kept(SampleText):
    """SampleText callback that keeps the texts of all validations, on every rank."""

    def __init__(self) -> None:
        super().__init__(PROMPTS, 12, SAMPLING.temperature, SAMPLING.top_k, seed=SAMPLING.seed, tokenizer="byte")
        self.texts: list[str] = []

    def _continued(self, *args: Any) -> str:
        self.texts.append(super()._continued(*args))
        return self.texts[-1]


def sampled(run: Run) -> tuple[list[str], dict[str, np.ndarray]]:
    kept = Kept()
    return kept.texts, fit(replace(run, callbacks=((lambda: kept, {}),)))["full_at_end"]


def text_of(weights: dict[str, np.ndarray], prompt: str) -> str:
    """Return the text that the whole model generates in this process."""
    model = GPT(CONFIG).eval()
    model.load_state_dict({name.removeprefix("model."): torch.from_numpy(array) for name, array in weights.items()})
    tokens = generate_tokens(logits_of(model), list(prompt.encode()) or [0], CONFIG.context_length, 12, SAMPLING, end=0)
    return prompt + ByteTokenizer().decode(torch.tensor([t for t in tokens if t], dtype=torch.int64))


def test_the_whole_model_writes(pools: Pools, tmp_path: Path) -> None:
    """Validations, but not the sanity check, sample the whole model's text and send it to the logger."""
    trainer = {"val_check_interval": 2, "num_sanity_val_steps": 1, "logger": "files", "default_root_dir": str(tmp_path)}
    module = partial(small_gpt, init_std=0.2)
    run = Run(module, dataset="tokens", val_samples=(8,), samples=32, trainer=trainer)
    results = pools.run(3, sampled, run)
    texts, weights = results[0]
    assert texts[2:] == [text_of(weights, prompt) for prompt in PROMPTS]
    assert texts[:2] != texts[2:]
    assert all(found == texts for found, _ in results)
    without = train(staged(replace(run, trainer={"val_check_interval": 2})))["weights"]
    assert_equal_weights({name: weights[name] for name in without}, without)
    (events,) = tmp_path.glob("**/events.out.tfevents.*")
    found = EventAccumulator(str(events.parent))
    found.Reload()
    first, second = found.Tensors("sample_0/text_summary")
    assert (first.step, second.step) == (2, 4)
    assert first.tensor_proto.string_val[0].startswith(b"    \x01\x02\x03")


def test_what_cannot_be_sampled_from_is_refused() -> None:
    run = Run(Net, "plain")
    with pytest.raises(ConfigurationError, match=r"(?s)samples from a GPTModule, not from a Net.*has no tokenizer"):
        make_trainer(run, callbacks=[SampleText()]).fit(Net(run))


def test_the_tokenizer_of_the_data_in_one_process(tmp_path: Path) -> None:
    """In one process, SampleText uses the data module's tokenizer, here one that is trained on the texts."""
    text = write_texts(tmp_path / "text", 8)
    sizes = {"vocab_size": 280, "context_length": 16}
    cache = str(tmp_path / "cache")
    data = TextDataModule(str(text), "bpe", batch_size=2, val_fraction=0.2, cache_dir=cache, **sizes)
    callback = SampleText(["line 3"], max_new_tokens=5)
    trainer = make_trainer(Run(Net, "plain"), max_steps=2, limit_val_batches=1, callbacks=[callback])
    module = GPTModule(GPTConfig(**sizes, num_layers=1, dim=16, num_heads=2))
    trainer.fit(module, datamodule=data)
    continued = callback._continued(trainer, module, callback._tokenizer(trainer), "line 3")
    assert continued.startswith("line 3")
    assert len(continued) > len("line 3")

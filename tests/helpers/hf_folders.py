"""Folders of small models as ``save_pretrained`` writes them, and batches for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300,
    "max_position_embeddings": 64,
}  # fmt: skip
TEXTS = ["def add(a, b):\n    return a + b\n", "What is two and two? It is four.", "the quick brown fox"]


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>", model_max_length=64
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_folder(folder: Path, kind: str = "Llama", head: str = "ForCausalLM", **config: Any) -> Path:
    """A model with random weights, its config and its tokenizer."""
    torch.manual_seed(0)
    shape = {**SMALL, **({"num_key_value_heads": 2} if kind in ("Llama", "Mixtral") else {}), **config}
    model = getattr(transformers, kind + head)(getattr(transformers, f"{kind}Config")(**shape))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def padded_batches(count: int, size: int = 4, time: int = 10) -> list[dict[str, Tensor]]:
    """Batches whose samples count differently many targets."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        tokens = torch.randint(1, 290, (size, time), generator=generator)
        mask = torch.ones_like(tokens)
        mask[1, 5:] = 0
        mask[-1, 2:] = 0
        batches.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)})
    return batches

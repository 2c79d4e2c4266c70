"""``asyncpp evaluate``: loss, perplexity and bits per byte of a saved model on tokens, in one process."""

from __future__ import annotations

import json
import math
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from lightning_asyncpp.data import TextDataModule, Tokenizer
from lightning_asyncpp.data.token_dataset import is_token_source
from lightning_asyncpp.models import GPT, SavedGPT, WeightsError
from lightning_asyncpp.tools.model_arguments import DTYPES, check_vocabulary, find_tokenizer, read_model
from lightning_asyncpp.tools.parsers import evaluate_parser
from lightning_asyncpp.trainer.gpt_module import IGNORED

_DATA = ("val_fraction", "context_length", "batch_size")


@dataclass(frozen=True)
class Evaluation:
    """What a model lost on tokens."""

    loss: float
    """Mean over the targets, in nats per token."""
    perplexity: float
    """exp of the loss."""
    bits_per_byte: float | None
    """Loss of all targets in bits, over the bytes of text that they stand for; ``None`` if nobody knows these."""
    tokens: int
    """Number of targets."""
    bytes: int | None
    """Bytes of text that they stand for."""
    sequences: int
    """Number of sequences, each with a context of its own."""


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate, print the figures, and write them if it is asked for."""
    arguments = evaluate_parser().parse_args(argv)
    saved = read_model(arguments)
    tokenizer = find_tokenizer(saved, arguments.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(saved, tokenizer, arguments, Path(folder))
        batches = batches_of(data, arguments.split)
        total = min(len(batches), arguments.limit_batches or len(batches))
        shown = tqdm(islice(batches, total), total=total, desc="evaluating", unit="batch", leave=False)
        model = saved.build(arguments.device, DTYPES[arguments.dtype])
        result = evaluate(model, shown, arguments.device, tokenizer)
    settings = {"model": arguments.model, "data": data.source, "split": arguments.split}
    content = {**settings, "context_length": data.context_length, **asdict(result)}
    print(_table(content))
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def make_data(saved: SavedGPT, tokenizer: Tokenizer | None, arguments: Namespace, folder: Path) -> TextDataModule:
    """The data to evaluate on, set up.

    Args:
        saved: the model.
        tokenizer: its tokenizer; ``None`` if nobody knows it.
        arguments: of the command.
        folder: where the tokenizer can be written for the data module to read.

    Raises:
        WeightsError: it is not the model's; with both numbers.
        DataError: it cannot be read.
    """
    given = {name: value for name in _DATA if (value := getattr(arguments, name)) is not None}
    source = arguments.data
    options = {"source": source, "context_length": saved.config.context_length, **given}
    if arguments.split == "all":
        if is_token_source(source):
            raise WeightsError(f"{source} is divided already: give --split validation or train")
        options["val_fraction"] = 0.0
    # In order and to the last sequence, also of the training split.
    options |= {"shuffle": False, "drop_last": False, "num_workers": 0}
    options |= _tokens_of(saved, tokenizer, source, folder)
    if options["context_length"] > saved.config.context_length:
        raise WeightsError(
            f"context_length={options['context_length']} of the data is longer than that of the model,"
            f" {saved.config.context_length}: lower it, --context-length {saved.config.context_length}"
        )
    data = TextDataModule(**options)
    data.prepare_data()
    data.setup()
    check_vocabulary(saved, data.vocab_size, exactly=tokenizer is None, what=source)
    return data


def batches_of(data: TextDataModule, split: str) -> Any:
    """The batches of a split, in their order.

    Raises:
        WeightsError: there are none.
    """
    loader = data.val_dataloader() if split == "validation" else data.train_dataloader()
    if not loader or not len(loader):
        raise WeightsError(
            f"{data.source} has nothing to validate on: give --split all or train, or --val-fraction above 0"
        )
    return loader


@torch.no_grad()
def evaluate(model: GPT, batches: Iterable[Tensor], device: str, tokenizer: Tokenizer | None = None) -> Evaluation:
    """Measure a model's loss.

    Args:
        model: in evaluation mode, on ``device``.
        batches: of tokens, (batch, time + 1) int64; -100 does not count as a target.
        device: where to compute.
        tokenizer: says how many bytes a token stands for, if it is known.
    """
    lengths = None if tokenizer is None else tokenizer.byte_lengths()
    loss = tokens = num_bytes = sequences = 0.0
    for batch in batches:
        inputs, targets = batch[:, :-1].to(device), batch[:, 1:].to(device)
        logits = model(inputs.clamp_min(0)).flatten(0, 1).float()  # (batch * time, vocab_size)
        # Each sum in fp32, as it is trained with; their sum, which can be millions of tokens, in fp64.
        loss += float(F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum"))
        counted = batch[:, 1:][batch[:, 1:] != IGNORED]
        tokens += counted.numel()
        sequences += len(batch)
        if lengths is not None:
            num_bytes += int(lengths[counted].sum())
    mean = loss / max(tokens, 1)
    bits = loss / math.log(2) / num_bytes if num_bytes else None
    known = None if lengths is None else int(num_bytes)
    perplexity = math.exp(mean) if mean < 700 else math.inf
    return Evaluation(mean, perplexity, bits, int(tokens), known, int(sequences))


def _tokens_of(saved: SavedGPT, tokenizer: Tokenizer | None, source: str, folder: Path) -> dict[str, Any]:
    """Arguments of the data module that make its tokens the model's, and have it refuse others."""
    are_tokens = is_token_source(source)
    if tokenizer is None and not are_tokens:
        raise WeightsError(
            f"{saved.origin} holds no tokenizer, and {source} is text; name it: --tokenizer byte, or a tokenizer.json"
        )
    known = saved.config if tokenizer is None else tokenizer
    vocab_size = known.vocab_size if are_tokens else None
    if tokenizer is None:
        return {"tokenizer": None, "vocab_size": vocab_size}
    tokenizer.save(folder)
    return {"tokenizer": str(folder / "tokenizer.json"), "vocab_size": vocab_size}


def _table(content: dict[str, Any]) -> str:
    bits = content["bits_per_byte"]
    rows = {
        "loss": f"{content['loss']:.4f} nats per token",
        "perplexity": f"{content['perplexity']:.3f}",
        "bits per byte": "not known" if bits is None else f"{bits:.4f}",
        "tokens": f"{content['tokens']:,} in {content['sequences']:,} sequences of up to {content['context_length']}",
        "data": f"{content['data']}, split {content['split']}",
    }
    return "\n".join(f"{name:<14}{text}" for name, text in rows.items())

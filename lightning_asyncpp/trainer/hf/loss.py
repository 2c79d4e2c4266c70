"""The loss of models of `transformers` over tokens: what goes in, what it is compared with, and what counts.

It is taken from the logits, not by the model's forward: the labels then need not travel from stage to stage, a
micro-batch without any target has a loss of 0 and not of 0 / 0, and the mean is over the targets that
``micro_batch_weight`` counts, whatever a release of `transformers` does with ``num_items_in_batch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.trainer.hf.loading import CLASSIFICATION

IGNORED = -100
CAUSAL, MASKED, SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
_BATCH, _TIME = 2, 8


def targets_of(batch: Any, task: str) -> Tensor:
    """What the model is to say, -100 where nothing counts: (batch, time) int64; of a classifier its labels.

    Args:
        batch: a mapping with ``labels``; or tokens, (batch, time + 1) int64, for a causal model.
        task: name of the auto class.

    Raises:
        ConfigurationError: it is neither.
    """
    if isinstance(batch, Tensor) and task == CAUSAL:
        return batch[:, 1:]
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        takes = "a mapping with input_ids, attention_mask and labels" + (" or tokens" if task == CAUSAL else "")
        raise ConfigurationError(
            f"HFModule(task={task!r}) takes {takes} as a batch, and the data gives a {type(batch).__name__}"
            f"{' with ' + ', '.join(map(str, batch)) if isinstance(batch, Mapping) else ''}"
        )
    if task == CAUSAL:
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED)  # as many as there are logits, which need no copy then
    return labels


def inputs_of(batch: Any, task: str, config: Any) -> dict[str, Any]:
    """What the model is called with."""
    if isinstance(batch, Tensor):
        inputs: dict[str, Any] = {"input_ids": batch[:, :-1].clamp_min(0)}
    elif task == CLASSIFICATION:
        inputs = dict(batch)
    else:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        if task == SEQ2SEQ and "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = _shifted_right(batch["labels"], config)
    return {**({"use_cache": False} if hasattr(config, "use_cache") else {}), **inputs}


def number_of_targets(batch: Any, task: str) -> float:
    """How many targets of a batch count; of a classifier its samples."""
    targets = targets_of(batch, task)
    if targets.is_floating_point():
        return float(len(targets))
    return float((targets != IGNORED).sum())


def mean_loss(output: Any, batch: Any, task: str) -> Tensor:
    """The mean over the targets that count, in nats; 0 without any. Of a classifier the loss of its own forward."""
    if task == CLASSIFICATION:
        loss: Tensor = output.loss
        return loss
    targets = targets_of(batch, task)
    losses = F.cross_entropy(
        output.logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return losses / (targets != IGNORED).sum().clamp_min(1)


def example_batch(task: str, config: Any) -> dict[str, Tensor]:
    """A small batch with padding: (2, 8) int64."""
    vocab_size = int(config.get_text_config().vocab_size)
    tokens = torch.arange(1, 1 + _BATCH * _TIME, device="cpu").view(_BATCH, _TIME) % vocab_size
    mask = torch.ones_like(tokens)
    mask[-1, -2:] = 0
    if task == CLASSIFICATION:
        labels = torch.zeros(_BATCH, dtype=torch.int64, device="cpu")
    else:
        labels = tokens.masked_fill(mask == 0, IGNORED)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _shifted_right(labels: Tensor, config: Any) -> Tensor:
    """What a decoder reads to say ``labels`` (batch, time): the start, and all but the last of them."""
    start, padding = config.decoder_start_token_id, config.pad_token_id
    if start is None or padding is None:
        raise ConfigurationError(
            "config.json has no decoder_start_token_id or no pad_token_id: give them in config_overrides, or"
            " decoder_input_ids in the batches"
        )
    return F.pad(labels[:, :-1], (1, 0), value=start).masked_fill(F.pad(labels[:, :-1], (1, 0)) == IGNORED, padding)

"""Models of Hugging Face `transformers`: reading, preparation for training, and loss.

The loss is computed here from the logits, not by the model's forward. This has three advantages. Labels need not be
sent from stage to stage. A microbatch without targets has the loss 0 in place of 0 / 0. The mean is over the targets
that ``microbatch_weight`` counts; releases of `transformers` differ in what they count.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_asyncpp.data.tokenizer import fetch
from lightning_asyncpp.dependencies import optional_package
from lightning_asyncpp.errors import ConfigurationError, DataError

Task = Literal[
    "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModelForSequenceClassification"
]
"""Auto class of `transformers`, which chooses the class of the model."""
Dtype = Literal["float32", "bfloat16"]
TASKS = get_args(Task)
CAUSAL, MASKED, SEQ2SEQ, CLASSIFICATION = TASKS
CONFIG = "config.json"
IGNORED = -100
_HEAD = re.compile(r"(score|classifier)\.")
_BATCH, _TIME = 2, 8
_SHORT = {"alpha": "lora_alpha", "dropout": "lora_dropout"}
_TASK_TYPES = {
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "AutoModelForSequenceClassification": "SEQ_CLS",
}


def transformers_package() -> Any:
    """Return the module ``transformers``.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    return optional_package("transformers", "HFModule")


def read_config(model_id: str, overrides: Mapping[str, Any]) -> Any:
    """Read the config of a model and override some of its fields.

    Args:
        model_id: a folder with a config.json, or the name of a model on the Hugging Face Hub.
        overrides: mapping of fields to values.

    Raises:
        ConfigurationError: the model or a field does not exist, or a pipeline cannot run the config.
    """
    try:
        if not Path(model_id).expanduser().is_dir():
            fetch(model_id, CONFIG)  # fails at once, where `transformers` would retry many times
        config, unknown = transformers_package().AutoConfig.from_pretrained(
            model_id, return_unused_kwargs=True, **overrides
        )
    except (DataError, OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"model_id={model_id!r}: {_first_line(error)}") from error
    if unknown:
        raise ConfigurationError(f"config_overrides: {type(config).__name__} has no {', '.join(sorted(unknown))}")
    if getattr(config, "output_router_logits", False):
        raise ConfigurationError(
            f"model_id={model_id!r}: its config has output_router_logits=True, but a pipeline does not collect the"
            " auxiliary loss of routers; set config_overrides={'output_router_logits': False}"
        )
    return config


def load_model(
    config: Any, model_id: str, task: str, pretrained: bool, dtype: str, attn_implementation: str | None
) -> nn.Module:
    """Build the model on the host, with pretrained or random weights.

    Args:
        config: result of :func:`read_config`.
        model_id: folder or repository of the weights.
        task: name of the auto class.
        pretrained: whether to read the weights; if not, they are drawn from torch's generator.
        dtype: dtype of the weights.
        attn_implementation: attention of `transformers`: "sdpa", "eager", ...; ``None``: its default.

    Raises:
        ConfigurationError: `transformers` has no such model, or weights are missing.
    """
    auto = getattr(transformers_package(), task)
    how: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    reads = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # mismatches are reported below
    if attn_implementation is not None:
        how["attn_implementation"] = attn_implementation
    try:
        if not pretrained:
            model: nn.Module = auto.from_config(config, **how)
            return model
        model, info = auto.from_pretrained(model_id, config=config, **reads, **how)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ConfigurationError(f"model_id={model_id!r}: {_first_line(error)}") from error
    mismatched = [entry[0] if isinstance(entry, tuple) else entry for entry in info["mismatched_keys"]]
    missing = sorted({*info["missing_keys"], *mismatched})
    if task == CLASSIFICATION:  # the head may be random: the files may be a language model's, or have other labels
        missing = [name for name in missing if name in mismatched and not _HEAD.match(name)]
    if missing:
        raise ConfigurationError(
            f"model_id={model_id!r} has no weights of the right shapes for {', '.join(map(str, missing[:4]))}"
            f" of {type(model).__name__}, so these would be random; choose another task, or pretrained=False to train"
            " all weights from scratch"
        )
    return model


def lora_config(lora: Mapping[str, Any], task: str) -> Any:
    """Return a ``peft.LoraConfig`` made from plain values.

    Args:
        lora: fields of the config; ``alpha`` and ``dropout`` are short for ``lora_alpha`` and ``lora_dropout``.
        task: name of the auto class.

    Raises:
        ConfigurationError: the config has no such field, or refuses a value.
    """
    peft = optional_package("peft", "lora=...")
    values = {_SHORT.get(name, name): value for name, value in lora.items()}
    try:
        return peft.LoraConfig(**{"task_type": _TASK_TYPES.get(task), **values})
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"lora={dict(lora)!r}: {error}") from error


def with_adapters(model: nn.Module, lora: Mapping[str, Any], task: str) -> nn.Module:
    """Put adapters into a model and freeze its other parameters.

    Raises:
        ConfigurationError: the model has no modules that ``lora`` selects.
    """
    config = lora_config(lora, task)
    try:
        adapted: nn.Module = optional_package("peft", "lora=...").get_peft_model(model, config)
    except ValueError as error:
        raise ConfigurationError(f"lora={dict(lora)!r}: {error}") from error
    return adapted


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match a pattern.

    Args:
        model: model whose parameters are frozen.
        patterns: globs of names as in the model's files: ``"model.embed_tokens.*"``, ``"*.layers.[01].*"``.

    Raises:
        ConfigurationError: a pattern matches no parameter, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    if useless := [pattern for pattern in patterns if not fnmatch.filter(parameters, pattern)]:
        raise ConfigurationError(
            f"freeze: no parameter matches {', '.join(map(repr, useless))};"
            f" the model's first parameters are {', '.join(list(parameters)[:4])}"
        )
    for name, parameter in parameters.items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigurationError(f"freeze={list(patterns)!r} leaves nothing to train")


def targets_of(batch: Any, task: str) -> Tensor:
    """Return the targets of a batch, (batch, time) int64 with -100 where there is none; for a classifier, the labels.

    Args:
        batch: a mapping with ``labels``; or tokens, (batch, time + 1) int64, for a causal model.
        task: name of the auto class.

    Raises:
        ConfigurationError: the batch has neither form.
    """
    if isinstance(batch, Tensor) and task == CAUSAL:
        return batch[:, 1:]
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        takes = "a mapping with input_ids, attention_mask and labels" + (" or tokens" if task == CAUSAL else "")
        raise ConfigurationError(
            f"HFModule(task={task!r}) takes {takes} as a batch, but the data has a {type(batch).__name__}"
            f"{' with ' + ', '.join(map(str, batch)) if isinstance(batch, Mapping) else ''}"
        )
    if task == CAUSAL:
        # Return one target per position of the logits, so that the logits need not be sliced and copied.
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return labels


def inputs_of(batch: Any, task: str, config: Any) -> dict[str, Any]:
    """Return the arguments of the model's forward."""
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
    """Return the number of targets other than -100; for a classifier, the number of samples."""
    targets = targets_of(batch, task)
    if targets.is_floating_point():
        return float(len(targets))
    return float((targets != IGNORED).sum())


def mean_loss(output: Any, batch: Any, task: str) -> Tensor:
    """Return the mean loss in nats over targets other than -100 (0 if none); for a classifier, the model's loss."""
    if task == CLASSIFICATION:
        loss: Tensor = output.loss
        return loss
    targets = targets_of(batch, task)
    losses = F.cross_entropy(
        output.logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return losses / (targets != IGNORED).sum().clamp_min(1)


def example_batch(task: str, config: Any) -> dict[str, Tensor]:
    """Return a small batch with padding, (2, 8) int64; a classifier's labels are (2,)."""
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
    """Return the decoder's inputs for ``labels`` (batch, time): the start token and all labels but the last."""
    start, padding = config.decoder_start_token_id, config.pad_token_id
    if start is None or padding is None:
        raise ConfigurationError(
            "config.json has no decoder_start_token_id or no pad_token_id: set them in config_overrides, or put"
            " decoder_input_ids into the batches"
        )
    return F.pad(labels[:, :-1], (1, 0), value=start).masked_fill(F.pad(labels[:, :-1], (1, 0)) == IGNORED, padding)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), repr(error))

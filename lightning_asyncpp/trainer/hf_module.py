"""LightningModule for models of Hugging Face `transformers`: continued pretraining and fine-tuning over stages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_asyncpp.adapt import pipelined
from lightning_asyncpp.core.randomness import seeded
from lightning_asyncpp.data.tokenizer import known_tokenizer, tokenizer_of_definition
from lightning_asyncpp.errors import ConfigurationError, check_choice
from lightning_asyncpp.trainer.gpt_module import Decay, default_optimizer, scheduled
from lightning_asyncpp.trainer.hf_model import (
    Dtype,
    Task,
    example_batch,
    freeze_parameters,
    inputs_of,
    load_model,
    lora_config,
    mean_loss,
    number_of_targets,
    read_config,
    with_adapters,
)

SAVED = "hf"
"""Entry of a checkpoint that ``asyncpp export`` needs in addition to the weights."""


class HFModule(LightningModule):
    """LightningModule that trains a model of `transformers` on tokens, prompts with responses, or labelled texts.

    Batches are mappings with ``input_ids``, ``attention_mask`` and ``labels``, (batch, time) int64 each and padded on
    the right; a label of -100 does not count. A causal model also takes tokens, (batch, time + 1) int64. Gradients are
    those of the mean loss over all labels of a batch except -100, for any number of microbatches.

    Every process reads the whole model into its host memory before the pipeline cuts it: 4 bytes per parameter and
    process with ``dtype="float32"``, 2 with ``"bfloat16"`` (7 billion parameters in 8 processes: 224 GB or 112).

    Mixtures of experts (Mixtral, Qwen3-MoE, DeepSeek-V3) are trained without an auxiliary loss. The auxiliary loss of
    `transformers` (``output_router_logits=True``, off by default) is refused, since it is not collected over stages. So
    nothing balances the experts, and a long training may use some of them more and more. ``freeze: ["*.gate.weight"]``
    keeps the routers as they were pretrained.

    Args:
        model_id: a folder written by ``save_pretrained``, or the name of a model on the Hugging Face Hub.
        pretrained: whether to start from the pretrained weights; if not, from random ones.
        task: auto class of `transformers`, which chooses the class of the model.
        dtype: dtype in which the weights are read. With ``"bfloat16"`` small updates are lost to rounding, so use it
            for a model that ``lora`` freezes. To train all weights in bf16, keep the default and use
            ``precision: bf16-mixed`` and the strategy's ``weight_dtype: bf16``.
        attn_implementation: ``"sdpa"``, ``"eager"``, ``"flash_attention_2"``, ...; ``None``: `transformers` chooses.
        config_overrides: fields of the model's config with new values: ``{"num_labels": 3}``.
        lora: fields of the ``LoraConfig`` of the package `peft`, such as ``{"r": 16, "alpha": 32}``, to train only
            adapters, in fp32; ``alpha`` and ``dropout`` are short for ``lora_alpha`` and ``lora_dropout``.
            Checkpoints also hold the frozen weights. ``asyncpp export`` merges the adapters into these weights, or
            writes only the adapters.
        freeze: globs of names of parameters that are not trained, such as ``"model.embed_tokens.*"``.
        gradient_checkpointing: keep only the inputs of blocks, and recompute the rest in the backward.
        optimizer: function that makes the optimizer from the whole model's trained, named parameters; ``None``:
            ``MuonAdamW`` with its defaults.
        warmup_steps: number of updates over which the learning rate rises linearly to the value set in the optimizer.
        decay: learning rate after the warmup: ``"cosine"``, ``"wsd"`` or ``"constant"``, as in
            :class:`~lightning_asyncpp.GPTModule`.
        min_lr_ratio: learning rate at the end of the decay, as a share of the highest one.
        total_steps: number of the last update of the decay; ``None``: the end of the run.

    Attributes:
        model: the network; ``None`` until :meth:`configure_model` ran.
        config: config of the model, an object of `transformers`.

    Raises:
        ConfigurationError: an argument is wrong, or the model does not exist.
        ImportError: `transformers`, or `peft` for ``lora``, is not installed.
    """

    def __init__(
        self,
        model_id: str,
        pretrained: bool = True,
        task: Task = "AutoModelForCausalLM",
        dtype: Dtype = "float32",
        attn_implementation: str | None = None,
        config_overrides: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        freeze: Sequence[str] = (),
        gradient_checkpointing: bool = False,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,  # Lightning's OptimizerCallable
        warmup_steps: int = 0,
        decay: Decay = "cosine",
        min_lr_ratio: float = 0.1,
        total_steps: int | None = None,
    ) -> None:
        super().__init__()
        for name, value, choices in (("task", task, Task), ("dtype", dtype, Dtype), ("decay", decay, Decay)):
            check_choice(name, value, choices)
        self.model_id, self.pretrained, self.task, self.dtype_name = model_id, pretrained, task, dtype
        self.attn_implementation = attn_implementation
        self.config_overrides, self.lora, self.freeze_patterns = config_overrides or {}, lora, tuple(freeze)
        self.gradient_checkpointing = gradient_checkpointing
        self.optimizer = optimizer or default_optimizer
        self.warmup_steps, self.decay, self.min_lr_ratio = warmup_steps, decay, min_lr_ratio
        self.total_steps = total_steps
        self.model: nn.Module | None = None
        if lora is not None:
            lora_config(lora, task)
        self.config = read_config(model_id, self.config_overrides)
        self.save_hyperparameters(ignore=["optimizer", "gradient_checkpointing", "attn_implementation"])
        self.hparams["freeze"] = list(freeze)

    def configure_model(self) -> None:
        """Read or draw the weights, and prepare the model for cutting between its blocks."""
        if self.model is not None:
            return
        seed = torch.initial_seed() % 2**63
        if self._trainer is not None:
            seed = self.trainer.strategy.broadcast(seed)  # every process draws the same weights
        with seeded(seed, torch.device("cpu")):
            config = type(self.config).from_dict(self.config.to_dict())  # loading the model may change it
            model = load_model(
                config, self.model_id, self.task, self.pretrained, self.dtype_name, self.attn_implementation
            )
            freeze_parameters(model, self.freeze_patterns)
            if self.gradient_checkpointing:
                _checkpoint_activations(model)
            if self.lora is not None:
                model = with_adapters(model, self.lora, self.task)
        batch = example_batch(self.task, config)
        self.model = pipelined(model.train(), inputs_of(batch, self.task, config))

    def setup(self, stage: str) -> None:
        """Compare the tokenizer of the data with the model's.

        Raises:
            ConfigurationError: they differ.
        """
        data = getattr(self.trainer, "datamodule", None)
        definition = None if data is None else data.state_dict().get("tokenizer")
        if not self.pretrained or not isinstance(definition, str):
            return
        own = known_tokenizer(self.model_id)
        if own is None:
            rank_zero_warn(
                f"model_id={self.model_id!r} has no tokenizer.json, so the data's tokenizer cannot be checked"
            )
        elif own.backend.to_str() != tokenizer_of_definition(definition).backend.to_str():
            raise ConfigurationError(
                f"the data's tokenizer is not that of model_id={self.model_id!r}. Give the data the argument"
                f" tokenizer={self.model_id!r}, or prepare the data with that tokenizer; with pretrained=False any"
                " tokenizer works"
            )

    def microbatch_weight(self, microbatch: Any) -> float:
        """Return the number of targets in ``microbatch`` that count; for a classifier, the number of samples."""
        return number_of_targets(microbatch, self.task)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log and return the mean loss of ``batch`` in nats per target."""
        loss = self._mean_loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log and return the mean loss of ``batch`` in nats per target."""
        loss = self._mean_loss(batch)
        self.log("val_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log and return the mean loss of ``batch`` in nats per target."""
        loss = self._mean_loss(batch)
        self.log("test_loss", loss)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimizer over the model's trained, named parameters, and the learning-rate schedule."""
        assert self.model is not None
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        return scheduled(self.optimizer(trained), self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the config of the model, so that ``asyncpp export`` needs only the checkpoint."""
        config = json.loads(self.config.to_json_string(use_diff=False))
        checkpoint[SAVED] = {"config": config, "task": self.task, "lora": self.lora, "model_id": self.model_id}

    def _mean_loss(self, batch: Any) -> Tensor:
        assert self.model is not None
        output = self.model(**inputs_of(batch, self.task, self.config))
        return mean_loss(output, batch, self.task)


def _checkpoint_activations(model: Any) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None)  # the name since transformers 5.24
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})

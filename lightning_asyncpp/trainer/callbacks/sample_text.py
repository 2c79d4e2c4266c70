"""Callback that samples text from a model during training, also over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import lightning as L
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import TensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_asyncpp.data import TextDataModule, Tokenizer
from lightning_asyncpp.data.tokenizer import load_tokenizer, prompt_tokens
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.models.sampling import NextLogits, Sampling, generate_tokens
from lightning_asyncpp.trainer.gpt_module import GPTModule


class SampleText(Callback):
    """Callback that continues prompts after every validation, and writes the texts to TensorBoard or to the screen.

    All ranks take part, and training waits: each token takes a forward through the whole pipeline and a broadcast. The
    callback does not change the training.

    Args:
        prompts: texts to continue; an empty text starts at the beginning of a document.
        max_new_tokens: maximum number of new tokens per prompt.
        temperature: divisor of the logits; 0 takes the most likely token.
        top_k: draw from this number of most likely tokens; ``None``: from all.
        top_p: draw from the most likely tokens with this total probability; ``None``: from all.
        seed: seed of the draws, the same at every validation.
        tokenizer: ``"byte"`` or the path of a tokenizer.json; ``None``: the tokenizer of the trainer's
            ``TextDataModule``.
    """

    def __init__(
        self,
        prompts: Sequence[str] = ("",),
        max_new_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        tokenizer: str | None = None,
    ) -> None:
        self.sampling = Sampling(temperature, top_k, top_p, seed)
        self.prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if max_new_tokens < 1 or not self.prompts:
            raise ValueError(
                f"SampleText needs prompts and tokens: prompts={self.prompts!r}, max_new_tokens={max_new_tokens!r}"
            )
        self.max_new_tokens = max_new_tokens
        self.tokenizer_name = tokenizer

    def setup(self, trainer: L.Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse, before training starts, a module or data that cannot be sampled from.

        Raises:
            ConfigurationError: the module is not a ``GPTModule``, or there is no tokenizer.
        """
        problems = []
        if not isinstance(pl_module, GPTModule):
            problems.append(
                f"SampleText samples from a GPTModule, not from a {type(pl_module).__name__}; leave the callback out"
            )
        datamodule = _datamodule(trainer)
        known = isinstance(datamodule, TextDataModule) and "tokenizer" in datamodule.state_dict()
        if self.tokenizer_name is None and not known:
            problems.append(
                "SampleText has no tokenizer: set its argument tokenizer to 'byte' or the path of a tokenizer.json, or"
                " train on a TextDataModule with a tokenizer"
            )
        if problems:
            raise ConfigurationError.from_problems(problems)
        self._tokenizer(trainer)  # raises if its file is missing

    def on_validation_end(self, trainer: L.Trainer, pl_module: LightningModule) -> None:
        """Continue the prompts; rank 0 writes the texts."""
        if trainer.sanity_checking:
            return
        assert isinstance(pl_module, GPTModule)
        tokenizer = self._tokenizer(trainer)
        texts = [self._continued(trainer, pl_module, tokenizer, prompt) for prompt in self.prompts]
        if trainer.is_global_zero:
            _write(trainer, texts)

    def _tokenizer(self, trainer: L.Trainer) -> Tokenizer:
        if self.tokenizer_name is not None:
            return load_tokenizer(self.tokenizer_name)
        datamodule = _datamodule(trainer)
        assert isinstance(datamodule, TextDataModule)
        return datamodule.tokenizer

    def _continued(self, trainer: L.Trainer, module: GPTModule, tokenizer: Tokenizer, prompt: str) -> str:
        agree: Callable[[int], int] = trainer.strategy.broadcast
        start = prompt_tokens(tokenizer, prompt)
        tokens = generate_tokens(
            _next_logits(trainer, module),
            start,
            module.config.context_length,
            self.max_new_tokens,
            self.sampling,
            end=tokenizer.end_of_document,
            vocab_size=tokenizer.vocab_size,
            agree=agree,
        )
        new = [token for token in tokens if token != tokenizer.end_of_document]
        # Decode together with the prompt: some tokenizers drop the first space of a text.
        whole, shown = (tokenizer.decode(torch.tensor(ids)) for ids in (start + new, start))
        return prompt + whole[len(shown) :]


def _next_logits(trainer: L.Trainer, module: GPTModule) -> NextLogits:
    """Return a function that runs the model over all stages; on the last stage it returns the next token's logits."""

    def last_logits(tokens: Tensor) -> Tensor:
        assert module.model is not None
        logits: Tensor = module.model(tokens)[:, -1]
        return logits

    through_stages: Callable[..., Tensor | None] | None = getattr(trainer.strategy, "evaluation_step", None)

    def next_logits(tokens: Tensor) -> Tensor | None:
        tokens = tokens.to(module.device)
        if through_stages is not None:
            return through_stages(last_logits, tokens)
        with trainer.precision_plugin.forward_context(), torch.no_grad():
            return last_logits(tokens)

    return next_logits


def _write(trainer: L.Trainer, texts: Sequence[str]) -> None:
    boards = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    for number, text in enumerate(texts):
        for board in boards:
            # Indent by four, so that TensorBoard's Markdown shows the text verbatim.
            shown = "\n".join(f"    {line}" for line in text.splitlines())
            board.experiment.add_text(f"sample_{number}", shown, trainer.global_step)
        if not boards:
            rank_zero_info(f"step {trainer.global_step}, sample {number}: {text}")


def _datamodule(trainer: L.Trainer) -> L.LightningDataModule | None:
    datamodule: L.LightningDataModule | None = trainer.datamodule  # type: ignore[attr-defined]
    return datamodule

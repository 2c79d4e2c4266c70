"""Train a Llama of `transformers` over pipeline stages with the Trainer.

    python examples/transformers_llama.py --devices 2

The model is LlamaForCausalLM itself, with one method more: its weights keep their names, and from_pretrained,
save_pretrained and generate work. The text is the source code of Python's standard library; a token is a byte.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from lightning_asyncpp import AsyncPipelineStrategy
from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW

PADDING = 256  # after the 256 bytes


class PipelineLlama(LlamaForCausalLM):
    """LlamaForCausalLM, with the layers that a pipeline may cut between.

    The layers of `transformers` take more than the output of the layer before. So each is paired with a function, which
    gets the layer and what the one before returned. What is needed on the way travels in a dictionary.
    """

    def pipeline_layers(self) -> list[Any]:
        """What LlamaForCausalLM.forward does, in its order."""
        return [
            (self.model.embed_tokens, self._embed),
            *((layer, self._decode) for layer in self.model.layers),
            (self.model.norm, lambda norm, carried: norm(carried["hidden_states"])),
            # The output of the last layer crosses no cut: it may be anything.
            (self.lm_head, lambda head, hidden_states: CausalLMOutputWithPast(logits=head(hidden_states))),
        ]

    def _embed(self, embed: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Any]:
        """What LlamaModel.forward does before its layers; ``input_ids`` is (batch, time)."""
        hidden_states = embed(input_ids)  # (batch, time, dim)
        position_ids = torch.arange(input_ids.size(1), device=input_ids.device).unsqueeze(0)
        no_cache = None  # by position: its name is another one in newer versions of transformers
        mask = create_causal_mask(self.config, hidden_states, attention_mask, no_cache, position_ids=position_ids)
        return {
            "hidden_states": hidden_states,
            "attention_mask": mask,  # (batch, 1, time, time), or None where no token is padding
            "position_embeddings": self.model.rotary_emb(hidden_states, position_ids=position_ids),  # two tensors
        }

    def _decode(self, layer: nn.Module, carried: dict[str, Any]) -> dict[str, Any]:
        # By position: gradient checkpointing with use_reentrant=True has no gradient for what comes by name.
        rest = {name: value for name, value in carried.items() if name != "hidden_states"}
        return {**carried, "hidden_states": layer(carried["hidden_states"], **rest)}


class Llama(L.LightningModule):
    """Predicts the next byte; sequences are padded at their end."""

    def __init__(self, model: PipelineLlama, lr: float = 0.02) -> None:
        super().__init__()
        self.model = model
        self.lr = lr

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean loss over the bytes that have one before them."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the same loss."""
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def microbatch_weight(self, microbatch: dict[str, Tensor]) -> float:
        """Number of bytes in the mean: sequences differ in length."""
        return float(microbatch["attention_mask"][:, 1:].sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Muon for the matrices, AdamW for the rest, corrected for the delay of one update."""
        return ErrorFeedback(list(self.named_parameters()), base=lambda named: MuonAdamW(named, lr=self.lr))

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids, mask = batch["input_ids"], batch["attention_mask"]  # (batch, time) each
        logits = self.model(input_ids=ids, attention_mask=mask).logits  # (batch, time, vocabulary)
        targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100)


def collate(texts: list[bytes]) -> dict[str, Tensor]:
    """Pad a batch to its longest text, as a tokenizer of `transformers` does."""
    ids = [torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in texts]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=PADDING),
        "attention_mask": pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
    }


def read_texts(count: int, longest: int = 64) -> list[bytes]:
    """Lines of Python source, of 2 to ``longest`` bytes."""
    files = sorted(Path(argparse.__file__).parent.glob("*.py"))
    lines = [line for file in files for line in file.read_bytes().splitlines() if len(line) > 1]
    return [line[:longest] for line in lines[:count]]


def loader(first: int, count: int) -> DataLoader:
    """Batches of 16 lines of the text."""
    return DataLoader(read_texts(first + count)[first:], batch_size=16, collate_fn=collate)  # type: ignore[arg-type]


def build(pretrained: str | None = None) -> Llama:
    """A small model, or one that save_pretrained has written; real weights are kept as they are."""
    if pretrained is not None:
        return Llama(PipelineLlama.from_pretrained(pretrained))
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=PADDING,
        tie_word_embeddings=False, use_cache=False,  # no cache while training
    )  # fmt: skip
    return Llama(PipelineLlama(config))


def main(
    devices: int = 2,
    steps: int = 100,
    pretrained: str | None = None,
    save: str | None = None,
    accelerator: str = "auto",
) -> L.Trainer:
    """Train on ``devices`` stages for ``steps`` batches, and save a folder that `transformers` loads."""
    L.seed_everything(1)
    trainer = L.Trainer(
        strategy=AsyncPipelineStrategy(microbatches=4), accelerator=accelerator, devices=devices, max_steps=steps,
        gradient_clip_val=1.0, use_distributed_sampler=False, logger=False, enable_checkpointing=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(build(pretrained), loader(64, 16 * steps), loader(0, 64))
    weights = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]  # a collective; whole on rank 0
    if save is not None and trainer.is_global_zero:
        whole = build(pretrained)
        whole.load_state_dict(weights)
        whole.model.save_pretrained(save)
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--pretrained", help="a folder of save_pretrained to start from")
    parser.add_argument("--save", help="a folder to write with save_pretrained")
    main(**vars(parser.parse_args()))

"""The stage of a GPT whose update ``asyncpp bench optimizer`` times: its weights, gradients, forward and backward."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_asyncpp.models import GPT, GPTConfig


@dataclass(frozen=True)
class StageShape:
    """What the stage consists of.

    Attributes:
        layers: transformer blocks.
        width: of the residual stream.
        heads, kv_heads: of the attention.
        mlp: inner width of the feed-forward layers.
        vocab: rows of an embedding on this stage; 0 for a stage in the middle.
        context: tokens of a sequence.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    context: int

    def config(self) -> GPTConfig:
        """The model that the stage is cut from.

        Raises:
            ValueError: the sizes do not fit together.
        """
        return GPTConfig(
            vocab_size=max(1, self.vocab), context_length=self.context, num_layers=self.layers, dim=self.width,
            num_heads=self.heads, num_kv_heads=self.kv_heads, mlp_dim=self.mlp,
        )  # fmt: skip

    def build(self, device: torch.device) -> nn.Sequential:
        """The same weights whenever it is called."""
        torch.manual_seed(0)
        embedding, *blocks, _ = GPT(self.config()).pipeline_layers()
        units = {f"block{i}": block for i, block in enumerate(blocks)}
        stage = nn.Sequential()
        for name, unit in {**({"embedding": embedding} if self.vocab else {}), **units}.items():
            stage.add_module(name, unit)
        return stage.to(device)


def make_gradients(stage: nn.Module) -> list[Tensor]:
    """Gradients of low rank and noise, as those of training are: singular values that fall over some decades."""
    generator = torch.Generator().manual_seed(1)
    gradients = []
    for p in stage.parameters():
        gradient = 1e-3 * torch.randn(p.shape, generator=generator)
        if p.ndim == 2:
            left, right = (torch.randn(size, 16, generator=generator) for size in p.shape)
            gradient += left * torch.logspace(0, -2, 16) @ right.T
        gradients.append(gradient.to(p.device))
    return gradients


def set_gradients(parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
    """Give every parameter a gradient of its own: some optimizers write into them."""
    for p, gradient in zip(parameters, gradients):
        if p.grad is None:
            p.grad = gradient.clone()
        else:
            p.grad.copy_(gradient)


class TrainingWork:
    """Forward and backward of one sequence through the stage, as a pipeline runs them.

    Args:
        shape: of the stage.
        stage: whose gradients it fills.
        bfloat16: whether products are taken in bfloat16, under autocast.
    """

    def __init__(self, shape: StageShape, stage: nn.Sequential, bfloat16: bool) -> None:
        self.stage, self.bfloat16 = stage, bfloat16
        self.device = next(stage.parameters()).device
        size = (1, shape.context) if shape.vocab else (1, shape.context, shape.width)
        self.input = torch.zeros(size, dtype=torch.int64) if shape.vocab else torch.randn(size, requires_grad=True)
        self.input = self.input.to(self.device).detach().requires_grad_(not shape.vocab)
        self.output_gradient = torch.randn(1, shape.context, shape.width, device=self.device)

    def run(self) -> None:
        """Once, gradients added to those that are there."""
        with torch.autocast(self.device.type, torch.bfloat16) if self.bfloat16 else nullcontext():
            output = self.stage(self.input)
        output.backward(self.output_gradient.to(output.dtype))

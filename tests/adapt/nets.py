"""Small networks of blocks, whose forwards differ in the code around and between the blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DIM = 8
SHAPE = (4, 3, DIM)


class Block(nn.Module):
    """Residual block with a norm, a linear layer and dropout, and optional further inputs."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Dropout(dropout)

    def forward(self, x: Tensor, *more: Any, scale: float = 1.0) -> Any:
        return x + scale * self.dropout(torch.tanh(self.linear(self.norm(x)))) + sum(m for m in more if m is not None)


class Net(nn.Module):
    """Network of consecutive blocks; subclasses have other code around the blocks."""

    block: type[Block] = Block

    def __init__(self, dropout: float = 0.0, count: int = 3) -> None:
        super().__init__()
        self.entry = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(self.block(dropout) for _ in range(count))
        self.out = nn.Linear(DIM, 1)
        self.drop = nn.Dropout(dropout)
        self.between = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(count))

    def forward(self, x: Tensor) -> Any:
        x = self.drop(self.entry(x))
        for block in self.blocks:
            x = block(x)
        return self.out(self.drop(x))


# -- networks in which each value is used on one stage, so that gradients are exact -----------------------------------


class Between(Net):
    """Network with modules between its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for between, block in zip(self.between, self.blocks):
            x = block(torch.tanh(between(x)))
        return self.out(x)


class Tied(Net):
    """Network that uses the entry's weight again after the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.out(nn.functional.linear(x, self.entry.weight))


class Asking(Net):
    """Network whose forward reads classes, shapes, dtypes and modes of modules that may be on another stage."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x.to(self.entry.weight.dtype))
        for block in self.blocks[: len(self.blocks)]:
            x = block(x.to(block.norm.bias.dtype), scale=1.0 / block.norm.normalized_shape[0])
            x = x * 2.0 if block.training and isinstance(block, Block) else x
        return self.out(x) / self.entry.weight.shape[0]


class MaskedBlock(Block):
    mask: Tensor

    def forward(self, x: Tensor, *more: Any, scale: float = 1.0) -> Tensor:
        return super().forward(x * self.mask)


class Masked(Net):
    """Network that shares a buffer with its blocks."""

    block = MaskedBlock

    def __init__(self, dropout: float = 0.0, count: int = 3) -> None:
        super().__init__(dropout, count)
        self.register_buffer("mask", torch.rand(DIM))
        for block in self.blocks:
            block.register_buffer("mask", self.mask)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x * self.mask)


class Noted(Net):
    """Network whose forward sets an attribute of each block, and reads one of them after the last block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
            block.kept = x.mean()
        return self.out(x) + self.blocks[-1].kept


class Added(Net):
    """Network that adds each block's input to its output, as most hand-written transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x) * 2
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


class Frozen(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        with torch.no_grad():
            x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return self.out(x)


class FlaggingBlock(Block):
    def forward(self, x: Tensor, *more: Any, scale: float = 1.0) -> tuple[Tensor, bool]:
        return super().forward(x, scale=scale), x.shape[1] > 5


class Flagged(Net):
    """Network in which a flag that a block returns determines an argument of the next block."""

    block = FlaggingBlock

    def forward(self, x: Tensor) -> Tensor:
        x, is_long = self.entry(x), False
        for block in self.blocks:
            x, is_long = block(x, scale=0.5 if is_long else 1.0)
        return self.out(x)


class Hooked(Net):
    """Network with hooks that change the input and the output of a block."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.blocks[1].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        self.blocks[1].register_forward_hook(lambda _, args, output: output * 3)


class Statistics(nn.Module):
    """Layer without parameters, but with a buffer that changes in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return x - self.mean


class Normalised(Net):
    """Network with a Statistics layer before the blocks and one after them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.first, self.last = Statistics(), Statistics()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.entry(x))
        for block in self.blocks:
            x = block(x)
        return self.out(self.last(x))


class HalvingBlock(Block):
    def forward(self, x: Tensor, *more: Any, scale: float = 1.0) -> Tensor:
        x = super().forward(x, scale=scale)
        return x[:, ::2] if x.shape[1] > 4 else x


class Halving(Net):
    """Network in which an argument of each block depends on the shape of the previous output."""

    block = HalvingBlock

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x, scale=1.0 / x.shape[1])
        return self.out(x)


class Checkpointed(Net):
    """Network with activation checkpointing of its blocks, and of its head with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block.__call__, x, use_reentrant=False)
        return checkpoint(self.end, x, use_reentrant=False)

    def end(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.dropout(x, 0.5, self.training))


class Noisy(Net):
    """Network that draws noise and a permutation before the blocks, and uses both after them."""

    def forward(self, x: Tensor) -> Tensor:
        noise = 0.1 * torch.randn_like(x) if self.training else torch.zeros_like(x)
        order = torch.randperm(x.shape[1]) if self.training else torch.arange(x.shape[1])
        x = self.entry(x + noise)
        for block in self.blocks:
            x = block(x)
        return self.out(x + noise)[:, order]


class PartlyFrozen(Net):
    """Network whose forward puts one block into evaluation mode, as in transfer learning."""

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[1].eval()
        return super().forward(x)


class Initialised(Net):
    """Network that initialises an attribute in its first forward, and counts calls."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.shift, self.calls = 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.shift = self.shift if self.calls else 1.0
        self.calls += 1
        return super().forward(x - self.shift)


# -- networks in which a value is used on several stages, so that gradients are equal up to rounding ------------------


class TellingBlock(Block):
    def forward(self, x: Tensor, *more: Any, scale: float = 1.0) -> tuple[Tensor, Tensor | None]:
        x = super().forward(x)
        return x, x.square().mean() if self.training or x.shape[1] > 4 else None


class Told(Net):
    """Network whose blocks return a second value for its output, but only in training or for long sequences."""

    block = TellingBlock

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.entry(x), torch.zeros(())
        for block in self.blocks:
            x, more = block(x)
            total = total if more is None else total + more
        return self.out(x) + total


class Skipping(Net):
    """Network that uses the entry's output in every block and after the last one."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.entry(x)
        for block in self.blocks:
            x = block(x, first)
        return self.out(x + first)


class Ladder(Net):
    """Network with skip connections from early to late blocks, as in a U-Net."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout, 5)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.entry(x), []
        for i, block in enumerate(self.blocks):
            if i > len(self.blocks) // 2:
                x = x + kept.pop()
            x = block(x)
            kept.append(x) if i < len(self.blocks) // 2 else None
        return self.out(x)


class InPlaceSkips(Net):
    """Network that changes outputs in place and uses them again, as U-Nets with ``ReLU(inplace=True)`` do."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.entry(x)
        first *= 2
        second = self.blocks[0](first)
        second += 1
        third = self.blocks[1](second).relu_()
        return self.out(self.blocks[2](third) + first + second + third)


class Auxiliary(Net):
    """Network with a head and a weight that are used only in training, on the middle block's output."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.head, self.factor = nn.Linear(DIM, 1), nn.Parameter(torch.full((), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        first = x = middle = self.entry(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            middle = x if i == 1 else middle
        x = self.out(x)
        return x + self.factor * self.head(middle) + first.mean() if self.training else x


class AddedLoss(torch.autograd.Function):
    """Identity whose backward also sends a gradient of 1 to a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, torch.ones(())


class WithLoss(Net):
    """Network with an additional loss that affects only the backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        loss = x.square().mean()
        for block in self.blocks:
            x = block(x)
        return AddedLoss.apply(self.out(x), loss)


EXACT = (
    Net, Between, Tied, Asking, Masked, Noted, Added, Frozen, Flagged, Hooked, Normalised, Halving,
    Checkpointed, Noisy, PartlyFrozen, Initialised,
)  # fmt: skip
"""Networks whose pipelines equal one process bit for bit."""
ROUNDED = (Told, Skipping, Ladder, InPlaceSkips, Auxiliary, WithLoss)
"""Networks whose pipelines equal one process up to the order in which gradients are added."""

"""Networks of a few blocks, whose forwards do all sorts of things around and between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DIM = 8
SHAPE = (4, 3, DIM)


class Block(nn.Module):
    """A layer of others."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Dropout(dropout)

    def forward(self, x: Tensor, *more: Any, scale: float = 1.0) -> Any:
        return x + scale * self.dropout(torch.tanh(self.linear(self.norm(x)))) + sum(m for m in more if m is not None)


class Net(nn.Module):
    """Blocks in a row; others differ in what is around them."""

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


# -- each value is used on one stage: gradients are exact -------------------------------------------------------------


class Between(Net):
    """Modules between blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for between, block in zip(self.between, self.blocks):
            x = block(torch.tanh(between(x)))
        return self.out(x)


class Tied(Net):
    """The entry's weight is used once more behind the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.out(nn.functional.linear(x, self.entry.weight))


class Asking(Net):
    """Asks for classes, shapes, dtypes and modes of modules that may be on another stage."""

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
    """Shares a buffer with its blocks."""

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
    """The code between blocks keeps what they gave in them, and reads it behind them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
            block.kept = x.mean()
        return self.out(x) + self.blocks[-1].kept


class Added(Net):
    """Sums behind each block, as in most transformers that are written at home."""

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
    """What a block says decides what the next one takes."""

    block = FlaggingBlock

    def forward(self, x: Tensor) -> Tensor:
        x, is_long = self.entry(x), False
        for block in self.blocks:
            x, is_long = block(x, scale=0.5 if is_long else 1.0)
        return self.out(x)


class Hooked(Net):
    """Hooks of blocks change what they take and return."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.blocks[1].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        self.blocks[1].register_forward_hook(lambda _, args, output: output * 3)


class Statistics(nn.Module):
    """Has a buffer that moves, and no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return x - self.mean


class Normalised(Net):
    """Statistics in front of the blocks and behind them."""

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
    """What a block takes follows from the shape of what the one before returned."""

    block = HalvingBlock

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x, scale=1.0 / x.shape[1])
        return self.out(x)


class Checkpointed(Net):
    """Runs blocks, and drops out, in checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return checkpoint(self.end, x, use_reentrant=False)

    def end(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.dropout(x, 0.5, self.training))


class Noisy(Net):
    """Noise and an order, drawn in front of the blocks, and used once more behind them."""

    def forward(self, x: Tensor) -> Tensor:
        noise = 0.1 * torch.randn_like(x) if self.training else torch.zeros_like(x)
        order = torch.randperm(x.shape[1]) if self.training else torch.arange(x.shape[1])
        x = self.entry(x + noise)
        for block in self.blocks:
            x = block(x)
        return self.out(x + noise)[:, order]


class PartlyFrozen(Net):
    """Puts a part of itself into evaluation mode, in the way of transfer learning."""

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[1].eval()
        return super().forward(x)


class Initialised(Net):
    """Sets itself up by its first batch, and counts calls."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.shift, self.calls = 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.shift = self.shift if self.calls else 1.0
        self.calls += 1
        return super().forward(x - self.shift)


# -- a value is used on several stages: gradients are equal to rounding -----------------------------------------------


class TellingBlock(Block):
    def forward(self, x: Tensor, *more: Any, scale: float = 1.0) -> tuple[Tensor, Tensor | None]:
        x = super().forward(x)
        return x, x.square().mean() if self.training or x.shape[1] > 4 else None


class Told(Net):
    """Blocks return another value in training, or for long batches, which is for the end."""

    block = TellingBlock

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.entry(x), torch.zeros(())
        for block in self.blocks:
            x, more = block(x)
            total = total if more is None else total + more
        return self.out(x) + total


class Skipping(Net):
    """What the entry gives goes to every block, and to the end."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.entry(x)
        for block in self.blocks:
            x = block(x, first)
        return self.out(x + first)


class Ladder(Net):
    """As in a U-Net: what early blocks gave comes to late ones."""

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
    """Changes in place what blocks returned, and needs it once more, as U-Nets with ``ReLU(inplace=True)`` do."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.entry(x)
        first *= 2
        second = self.blocks[0](first)
        second += 1
        third = self.blocks[1](second).relu_()
        return self.out(self.blocks[2](third) + first + second + third)


class Auxiliary(Net):
    """A head and a weight that training alone uses, of what a block in the middle gave."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.head, self.factor = nn.Linear(DIM, 1), nn.Parameter(torch.full((), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.entry(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            middle = x if i == 1 else first
        x = self.out(x)
        return x + self.factor * self.head(middle) + first.mean() if self.training else x


class AddedLoss(torch.autograd.Function):
    """Shows in the backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, torch.ones(())


class WithLoss(Net):
    """A loss that only the backward sees."""

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
"""Their pipelines train to the last bit as one process does."""
ROUNDED = (Told, Skipping, Ladder, InPlaceSkips, Auxiliary, WithLoss)
"""The same but for the order in which gradients may be added."""

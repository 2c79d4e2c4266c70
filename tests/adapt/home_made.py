"""Models as users write them: without support for pipelines, and mostly without a list of layers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, TIME, DIM, FEATURES = 11, 6, 8, 5


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (6, TIME))


def vectors() -> Tensor:
    return torch.randn(6, FEATURES)


def images() -> Tensor:
    return torch.randn(6, 3, 8, 8)


class Positions(nn.Module):
    """Positional encoding of torch's tutorials."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(TIME)[:, None] * torch.exp(torch.arange(0, DIM, 2) * (-math.log(1e4) / DIM))
        self.register_buffer("table", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, DIM)
        return self.dropout(x + self.table[: x.size(1)])


class Tutorial(nn.Module):
    """Language model of torch's tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, DIM), Positions()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, 2, 12, batch_first=True), 3)
        self.linear = nn.Linear(DIM, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        return self.linear(self.encoder(self.positions(self.embedding(x) * math.sqrt(DIM)), mask))


class Translation(nn.Module):
    """Model with torch's whole ``nn.Transformer``, encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.transformer = nn.Transformer(DIM, 2, 2, 2, 12, batch_first=True)

    def forward(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        target = source if target is None else target
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        return self.out(self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask))


class Perceptron(nn.Module):
    """Model whose layers are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(FEATURES, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        return self.third(x)


class Convolutions(nn.Module):
    def __init__(self, taken: int, given: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(taken, given, 3, padding=1), nn.GroupNorm(1, given), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class UNet(nn.Module):
    """Model whose layers are attributes, with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = Convolutions(3, 4), Convolutions(4, 6), Convolutions(6, 8)
        self.up2, self.join2 = nn.ConvTranspose2d(8, 6, 2, 2), Convolutions(12, 6)
        self.up1, self.join1 = nn.ConvTranspose2d(6, 4, 2, 2), Convolutions(8, 4)
        self.out = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.middle(F.max_pool2d(second, 2))
        x = self.join2(torch.cat([self.up2(x), second], 1))
        return self.out(self.join1(torch.cat([self.up1(x), first], 1)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.attention(x, x, x, need_weights=False)[0]


class Pairs(nn.Module):
    """Model with a list of lists of layers, which the forward unpacks."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.layers = nn.ModuleList([
            nn.ModuleList([Attention(), nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.GELU())])
            for _ in range(count)
        ])  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for attention, feed_forward in self.layers:
            x = attention(x) + x
            x = feed_forward(x) + x
        return self.out(x)


class Rotating(nn.Module):
    """Layer that rotates pairs of numbers by multiplication with complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.norm(x).unflatten(-1, (-1, 2)).contiguous())  # (batch, time, DIM / 2)
        return x + self.linear(torch.view_as_real(pairs * turns).flatten(2))


class Rotary(nn.Module):
    """Model that passes complex numbers from an attribute to every layer, as Meta's Llama does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.layers = nn.ModuleList(Rotating() for _ in range(3))
        angles = torch.outer(torch.arange(2 * TIME), 1e4 ** -torch.arange(0, 1, 2 / DIM))
        self.turns = torch.polar(torch.ones_like(angles), angles)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        self.turns = self.turns.to(x.device)
        turns, x = self.turns[start : start + x.size(1)], self.embedding(x)
        for layer in self.layers:
            x = layer(x, turns)
        return self.out(x)


class Recurrent(nn.Module):
    """Model with a list of LSTMs, each of which also returns a state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.layers = nn.ModuleList(nn.LSTM(DIM, DIM, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x, _ = layer(x)
        return self.out(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, DIM)
        return x + self.dropout(F.gelu(self.linear(self.norm(x))))


class NanoGPT(nn.Module):
    """Model like nanoGPT: a dictionary of modules, tied weights, dropout before the blocks, the loss in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(VOCABULARY, DIM), "wpe": nn.Embedding(TIME, DIM), "drop": nn.Dropout(0.1),
            "h": nn.ModuleList(Block() for _ in range(3)), "ln_f": nn.LayerNorm(DIM),
        })  # fmt: skip
        self.lm_head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        places = torch.arange(tokens.size(1), device=tokens.device)
        x = self.transformer.drop(self.transformer.wte(tokens) + self.transformer.wpe(places))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


HOME_MADE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], list[str]]] = {
    "tutorial": (Tutorial, tokens, [f"encoder.layers.{i}" for i in range(3)]),
    "translation": (Translation, tokens, ["transformer.encoder.layers.0", "transformer.decoder.layers.1"]),
    "perceptron": (Perceptron, vectors, ["first", "second", "third"]),
    "unet": (UNet, images, ["down1", "middle", "up2", "join2", "up1", "join1", "out"]),
    "pairs": (Pairs, tokens, ["layers.0.0", "layers.0.1", "layers.2.0", "layers.2.1", "out"]),
    "rotary": (Rotary, tokens, ["layers.0", "layers.1", "layers.2"]),
    "recurrent": (Recurrent, tokens, ["layers.0", "layers.2", "out"]),
}
"""Name -> model, function that makes its batch, and layers between which a pipeline is cut."""

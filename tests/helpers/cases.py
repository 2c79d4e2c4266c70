"""Cases that the engine and the oracle both run: models, data and options, made from a description."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_asyncpp.auxiliary import StatisticsLayer, add_auxiliary_loss, add_statistics
from lightning_asyncpp.core.cut.partition import uniform
from lightning_asyncpp.core.cut.units import has_parameters, pipeline_units
from lightning_asyncpp.core.schedule import Slack, Staleness
from lightning_asyncpp.core.tree import children_of
from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW

DIM = 6


class Projection(nn.Module):
    """Layer with x @ w, a norm and an elementwise scale, which break if weights are re-pointed under a live graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / DIM**0.5)
        self.scale = nn.Parameter(torch.rand(DIM) + 0.5)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x @ self.weight) * self.scale


class Experts(nn.Module):
    """Layer with batched expert weights in one bmm, and an RMS norm."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, DIM, DIM) / DIM**0.5)
        self.norm = nn.RMSNorm(DIM)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.bmm(x.unsqueeze(0).expand(3, -1, -1), self.experts)
        return x + self.dropout(self.norm(torch.tanh(y).sum(0)))


class Spare(nn.Module):
    """Layer with a parameter that only microbatches with a positive sum use, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Parameter(torch.ones(DIM))
        self.never = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.sometimes if float(x.detach().sum()) > 0 else x


class Routed(StatisticsLayer):
    """Layer that sends every sample to one of three scales, adds auxiliary losses, and learns a bias from counts."""

    num_statistics = 4
    versioned_buffers = ("bias",)
    metrics = {"samples": "sum", "busiest": "max"}

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(3, DIM) / DIM**0.5)
        self.scales = nn.Parameter(torch.rand(3, DIM) + 0.5)
        self.register_buffer("bias", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ self.router.T).softmax(-1)  # (samples, 3)
        chosen = (scores + self.bias).argmax(-1)
        add_auxiliary_loss(0.3 * scores.square().mean() + 0.1 * x.mean() ** 2)
        add_auxiliary_loss(0.2 * scores[:, 0].mean())
        add_statistics(self, torch.cat([torch.bincount(chosen, minlength=3), torch.tensor([len(x)])]))
        return x + scores.gather(1, chosen[:, None]) * self.scales[chosen]

    def update_from_statistics(self, totals: Tensor) -> None:
        self.bias += 0.05 * torch.sign(totals[:3].mean() - totals[:3]).to(self.bias)

    @classmethod
    def compute_metrics(cls, totals: Tensor) -> dict[str, float]:
        return {"samples": float(totals[3]), "busiest": float(totals[:3].max() / totals[:3].mean())}


def make_model(dropout: float = 0.0, spare: bool = False, tied: bool = False, routed: bool = False) -> nn.Sequential:
    """Return a model of seven layers with parameters and two without.

    ``spare`` adds a layer whose parameters are not always used, ``tied`` a layer that shares the weight of the first
    one, and ``routed`` two layers with auxiliary losses and statistics.
    """
    torch.manual_seed(11)
    model = nn.Sequential(
        nn.Linear(DIM, DIM), nn.GELU(), Projection(), Experts(dropout), *([Routed()] if routed else []),
        nn.Linear(DIM, DIM, bias=False), nn.Tanh(), Projection(), Experts(dropout), *([Spare()] if spare else []),
        *([Routed()] if routed else []), *([nn.Linear(DIM, DIM)] if tied else []), nn.Linear(DIM, 1),
    )  # fmt: skip
    if tied:
        model[-2].weight = model[0].weight
    return model


def frozen_in_front(dropout: float) -> nn.Sequential:
    """Return a model whose first layer records statistics, but has no trainable parameters."""
    torch.manual_seed(13)
    layers = [Routed().requires_grad_(False), nn.Linear(DIM, DIM), nn.Tanh(), Projection(), nn.Linear(DIM, 1)]
    return nn.Sequential(*layers)


class CountingSGD(torch.optim.Optimizer):
    """SGD whose steps depend on a step count and a maximum learning rate, both kept in ``param_groups``."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "largest_lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            group["largest_lr"] = max(group["largest_lr"], group["lr"])
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] / (1 + 0.1 * group["count"]) + 0.01 * group["largest_lr"]))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.02, betas=(0.8, 0.9)),
    "muon": functools.partial(MuonAdamW, lr=0.02, weight_decay=0.05),
    "counting": CountingSGD,
}


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a scheduler that decreases the learning rate."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 / (1 + 0.3 * t))


@dataclass(frozen=True)
class Case:
    """Description of a run, for a pipeline and for the oracle."""

    microbatches: int
    lookahead: int | None = None
    delay: int = 1
    data_parallel_size: int = 1
    optimizer: str = "adamw"
    error_feedback: float | None = None
    max_norm: float | None = None
    scheduler: bool = False
    dropout: float = 0.0
    accumulate: int = 1
    batch_sizes: tuple[int, ...] = (8, 8, 8, 8, 8)
    unequal_weights: bool = False
    nan_at: int | None = None
    drains: tuple[int, ...] = ()
    random_input: bool = False
    checkpointing: bool = False
    spare: bool = False
    same_data: bool = False  # all replicas read replica 0's batches
    tied: bool = False
    routed: bool = False
    staleness: Staleness = "uniform"
    slack: Slack = 0
    start: int = 0  # number of initial mini-batches without delay
    bf16: bool = False  # bf16 weight versions beside fp32 masters
    resumes: tuple[int, ...] = ()  # after these batches a new engine resumes from the state of the old one
    evaluates: tuple[int, ...] = ()  # after these batches the pipeline is drained and evaluated
    model: Callable[[float], nn.Sequential] | None = None  # function of the dropout that makes another model
    cut: str | tuple[int, ...] = "even"  # "front" or "back": the longest possible stage there; or counts of layers
    seed: int = 5
    device: str = "cpu"

    def counts(self, num_stages: int) -> list[int]:
        """Return each stage's number of layers; "front" and "back" leave other stages one layer with parameters."""
        if not isinstance(self.cut, str):
            return list(self.cut)
        units = pipeline_units(self.make_model())
        heavy = [i for i, unit in enumerate(units) if any(True for _ in unit.module.parameters())]
        if self.cut == "even":
            return uniform(list(map(has_parameters, units)), num_stages)
        if self.cut == "front":
            starts = [0, *heavy[len(heavy) - num_stages + 1 :]]
        else:  # layers without parameters go to the stage after them
            starts = [0, *[i + 1 for i in heavy[: num_stages - 1]]]
        return [end - start for start, end in zip(starts, [*starts[1:], len(units)])]

    def batch(self, index: int, replica: int = 0) -> dict[str, Tensor]:
        """Return batch ``index`` of a replica; with ``unequal_weights``, samples have integer weights from 0 to 3."""
        replica = 0 if self.same_data else replica
        generator = torch.Generator().manual_seed(1000 + 31 * index + 7919 * replica)
        size = self.batch_sizes[index]
        x = torch.randn(size, DIM, generator=generator)
        if index == self.nan_at and size:
            x[size // 2] = float("nan")
        weight = torch.randint(0, 4, (size,), generator=generator).float() if self.unequal_weights else torch.ones(size)
        y = torch.randn(size, 1, generator=generator)
        return {"x": x.to(self.device), "y": y.to(self.device), "weight": weight.to(self.device)}

    def step(self, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the user's step, which runs the model by ``call``."""

        def step(microbatch: dict[str, Tensor], _: float = 0.0) -> Tensor:
            x = microbatch["x"]
            if self.random_input:
                x = x + 0.1 * torch.randn_like(x)
            out = call(x)
            if self.random_input:
                out = out * (1 + 0.1 * torch.rand(()))
            loss = F.mse_loss(out, microbatch["y"], reduction="none").squeeze(1)
            return (loss * microbatch["weight"]).sum() / microbatch["weight"].sum()

        return step

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, torch.bfloat16) if self.bf16 else nullcontext()

    def weight(self, microbatch: dict[str, Tensor]) -> float:
        return float(microbatch["weight"].sum())

    def make_model(self) -> nn.Sequential:
        model = self.model(self.dropout) if self.model else make_model(self.dropout, self.spare, self.tied, self.routed)
        return model.to(self.device)

    def make_base(self, parameters: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](parameters)

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.error_feedback is None:
            return self.make_base(parameters)
        return ErrorFeedback(parameters, OPTIMIZERS[self.optimizer], strength=self.error_feedback)

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        return decay(optimizer) if self.scheduler else None

    @property
    def mini_batches(self) -> list[list[int]]:
        """Indices of the batches in each mini-batch, which share an update."""
        count = len(self.batch_sizes)
        return [list(range(i, min(i + self.accumulate, count))) for i in range(0, count, self.accumulate)]


class Sleeping(nn.Linear):
    """Linear layer that sleeps in its forward and in its backward."""

    def __init__(self, width: int, milliseconds: float) -> None:
        super().__init__(width, width)
        self.seconds = milliseconds / 1e3

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        output = super().forward(x)
        output.register_hook(lambda _: time.sleep(self.seconds))
        return output


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, x * 0.5, x.detach() > 0, torch.arange(x.shape[1], dtype=torch.int32)),
    "list": lambda x: [x, [None, (x.detach().sign().to(torch.int8),)], torch.zeros(0)],
    "dict": lambda x: {"text": "a", "x": x, "none": None, "flag": True, "rest": {"n": 3, "y": x * 0.25, "e": 1e-3}},
    "twice": lambda x: (x, x),
    "strided": lambda x: (x.t().contiguous().t(), (x * 2)[:, ::2]),
    "half": lambda x: (x, x.detach().double(), x.to(torch.bfloat16), torch.tensor(0.5)),
}
"""Forms of a layer's result, of which the next layer makes one tensor."""

KINDS = ("linear", "projection", "experts", "routed", "spare", "frozen", "half frozen", "no parameters", "inside")
SHARED = ("as first", "as last", "same module", "same dropout")
"""Linear layers that share a weight with the first or the last one before them, or are the first one again; and a
dropout layer that is used in several places."""


class Inside(nn.Module):
    """Layer made of two linear layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Layer(nn.Module):
    """Layer that combines its input into one tensor, applies a module, and returns the result in one of ``FORMS``."""

    def __init__(self, inner: nn.Module, form: str) -> None:
        super().__init__()
        self.inner, self.form = inner, form

    def forward(self, given: Any) -> Any:
        return FORMS[self.form](self.inner(one_tensor(given)))


def one_tensor(given: Any) -> Tensor:
    """Combine all leaves into one tensor; the order of summation does not depend on their layout in memory."""
    leaves = list(leaves_of(given))
    x = leaves.pop(next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)))
    for other in leaves:
        if isinstance(other, Tensor):
            value = other.to(x.dtype)
            x = x + 0.1 * (value if value.shape == x.shape else value.contiguous().sum())
        elif isinstance(other, (bool, int, float)):
            x = x * (1 + 0.01 * other)
    return x.contiguous()


def leaves_of(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Tensor) or not isinstance(tree, (tuple, list, dict)):
        yield tree
    else:
        for child in children_of(tree):
            yield from leaves_of(child)


def make(layers: tuple[tuple[str, str], ...], dropout: float) -> nn.Sequential:
    """Return a model with a layer for each (kind, form), and a last layer that returns one number per sample."""
    torch.manual_seed(12)
    linears: list[nn.Linear] = []
    same = nn.Dropout(dropout)
    made: list[Any] = []
    for kind, form in layers:
        if kind == "same dropout":
            made += [Layer(nn.Identity(), "tensor"), same]
        else:
            made.append(Layer(_inner(kind, linears, dropout), form))
    return nn.Sequential(*made, Layer(nn.Linear(DIM, 1), "tensor"))


def _inner(kind: str, linears: list[nn.Linear], dropout: float) -> nn.Module:
    if kind == "same module":
        return linears[0]
    if kind in ("projection", "experts", "routed", "spare", "no parameters", "inside"):
        return {
            "projection": Projection, "experts": lambda: Experts(dropout), "routed": Routed, "spare": Spare,
            "no parameters": nn.Tanh, "inside": Inside,
        }[kind]()  # fmt: skip
    linear = nn.Linear(DIM, DIM)
    if kind in ("as first", "as last"):
        linear.weight = linears[0 if kind == "as first" else -1].weight
    if kind == "frozen":
        return linear.requires_grad_(False)
    if kind == "half frozen":
        linear.bias.requires_grad_(False)
    linears.append(linear)
    return linear

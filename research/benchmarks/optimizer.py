"""How long an optimizer's step takes, and what Error Feedback adds to it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW
from research.benchmarks.options import parse_options
from research.benchmarks.report import Spread, describe_machine, print_table

MUON_LR, ADAMW_LR, DECAY, BETAS = 3e-3, 1e-3, 0.1, (0.9, 0.95)
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "float32": {"newton_schulz_dtype": "float32"},
}
"""MuonAdamW, with its options."""
_FEEDBACK = "feedback"


@dataclass(frozen=True)
class OptimizerStep:
    """Time of an update of one stage of a GPT; the sizes are SmolLM-360M's, of which a stage of four has 8 layers.

    Every system has its own copy of the weights and steps with the same gradients. First all take two steps, and their
    weights are compared with torch's: Newton-Schulz runs in bfloat16, with the same coefficients. Then they take turns,
    and ratios are taken within a turn. Error Feedback is measured around an optimizer that does nothing, because it
    costs less than the noise of a step. Not measured: the strategies' own work, and the reduction of gradients.

    Attributes:
        layers, width, heads, kv_heads, mlp: of the transformer blocks.
        vocab: rows of the embedding on the stage; 0: a stage in the middle.
        repeats: how often every system steps.
        threads: of torch; 0: as many as it takes by itself.
        systems: what is compared with torch's Muon and AdamW; pytorch_optimizer has to be installed.
    """

    layers: int = 2
    width: int = 960
    heads: int = 15
    kv_heads: int = 5
    mlp: int = 2560
    vocab: int = 49152
    repeats: int = 9
    threads: int = 0
    device: str = "cpu"
    systems: tuple[str, ...] = ("ours", "torch-fused", "pytorch_optimizer")

    def make_stage(self) -> nn.Sequential:
        """The same weights whenever it is called."""
        torch.manual_seed(0)
        config = GPTConfig(
            vocab_size=max(1, self.vocab), context_length=128, num_layers=self.layers, dim=self.width,
            num_heads=self.heads, num_kv_heads=self.kv_heads, mlp_dim=self.mlp,
        )  # fmt: skip
        embedding, *blocks, _ = GPT(config).pipeline_layers()
        stage = nn.Sequential()
        for name, unit in [("embedding", embedding)] * bool(self.vocab) + [
            (f"block{i}", block) for i, block in enumerate(blocks)
        ]:
            stage.add_module(name, unit)
        return stage.to(self.device)


def make_gradients(stage: nn.Module) -> list[Tensor]:
    """Of low rank and noise, as those of training are: singular values that fall over some decades."""
    generator, gradients = torch.Generator().manual_seed(1), []
    for p in stage.parameters():
        gradient = 1e-3 * torch.randn(p.shape, generator=generator)
        if p.ndim == 2:
            left, right = (torch.randn(size, 16, generator=generator) for size in p.shape)
            gradient += left * torch.logspace(0, -2, 16) @ right.T
        gradients.append(gradient.to(p.device))
    return gradients


def make_optimizers(system: str, stage: nn.Module) -> Sequence[Optimizer]:
    """The optimizers of a system, all with the same settings."""
    if system in OURS:
        options: dict[str, Any] = {"lr": MUON_LR, "adamw_lr": ADAMW_LR, "weight_decay": DECAY}
        return [MuonAdamW(stage.named_parameters(), **options, adamw_betas=BETAS, **OURS[system])]
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in stage.named_parameters():
        (matrices if p.ndim == 2 and "embedding" not in name else others).append(p)
    if system == "pytorch_optimizer":
        from pytorch_optimizer import Muon

        muon = {"params": matrices, "use_muon": True, "lr": MUON_LR, "use_adjusted_lr": True}
        adamw = {"params": others, "use_muon": False, "lr": ADAMW_LR, "betas": BETAS, "eps": 1e-8}
        return [Muon([{**group, "weight_decay": DECAY} for group in (muon, adamw)])]
    if system not in ("torch", "torch-fused"):
        known = ", ".join((*OURS, "torch", "torch-fused", "pytorch_optimizer"))
        raise ValueError(f"--systems {system}: there is no such system. Choose from {known}.")
    fused = True if system == "torch-fused" else None
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=ADAMW_LR, weight_decay=DECAY, betas=BETAS, fused=fused),
    ]


class _NoStep(Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Leave the weights as they are."""


def feedback_alone(stage: nn.Module) -> Callable[[], None]:
    """A step of Error Feedback around an optimizer that does nothing, with the weights before lent as in a pipeline."""
    parameters = list(stage.parameters())
    for p, gradient in zip(parameters, make_gradients(stage), strict=True):
        p.grad = gradient  # what has none does not move, and needs no correction
    feedback = ErrorFeedback(parameters, partial(_NoStep, defaults={}))
    before: dict[Tensor, Tensor] = {p: p.detach().clone() for p in parameters}

    def step() -> None:
        with feedback.weights_before(before):
            feedback.step()

    return step


def take_turns(actions: Mapping[str, Callable[[], None]], repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of every action in every repeat, after one that is not counted; the order turns round each time."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(repeats + 1):
        names = list(actions)
        for name in names if repeat % 2 else reversed(names):
            _synchronize(device)
            started = time.perf_counter()
            actions[name]()
            _synchronize(device)
            if repeat:
                times[name].append(time.perf_counter() - started)
    return times


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def relative_difference(own: Sequence[Tensor], reference: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """Norm of the difference of the weights over that of the reference's step."""
    difference, step = (
        sum(float((p.detach() - q.detach()).double().square().sum()) for p, q in zip(one, reference, strict=True))
        for one in (own, start)
    )
    return math.sqrt(difference / step)


def main(argv: Sequence[str]) -> None:
    """Compare the results, time the systems and print the tables."""
    options = parse_options(OptimizerStep, "optimizer", argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    systems = ["torch", *(system for system in options.systems if system != "torch")]
    stages = {system: options.make_stage() for system in systems}
    actions: dict[str, Callable[[], None]] = {}
    for system, stage in stages.items():
        optimizers = make_optimizers(system, stage)
        actions[system] = partial(_step_all, optimizers)
        for _ in range(2):
            for p, gradient in zip(stage.parameters(), make_gradients(stage), strict=True):
                p.grad = gradient
            actions[system]()
    start, reference = (list(stage.parameters()) for stage in (options.make_stage(), stages["torch"]))
    differences = {s: relative_difference(list(stages[s].parameters()), reference, start) for s in systems}
    actions[_FEEDBACK] = feedback_alone(options.make_stage())
    times = take_turns(actions, options.repeats, options.device)
    rows = []
    for system in systems:
        speed = [base / own for base, own in zip(times["torch"], times[system], strict=True)]
        rows.append([system, _milliseconds(times[system]), Spread.of(speed).text(2), f"{differences[system]:.1e}"])
    print_table(["system", "ms per step", "speed over torch", "difference from torch, of the step"], rows)
    own = systems[min(1, len(systems) - 1)]
    added, step = (statistics.median(times[name]) for name in (_FEEDBACK, own))
    print(f"Error Feedback adds {_milliseconds(times[_FEEDBACK])} ms, {added / step:.1%} of the step of {own}.")
    print(f"{torch.get_num_threads()} threads, {options.device}; {describe_machine()}")


def _step_all(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()


def _milliseconds(seconds: Sequence[float]) -> str:
    return Spread.of([value * 1e3 for value in seconds]).text(1)

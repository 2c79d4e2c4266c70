"""What a few steps of a small copy tell of an optimizer, and that they leave no trace."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn

import lightning_asyncpp.optim as own
from lightning_asyncpp.core.optimizers.configured import EmptyOptimizers, is_placeholder
from lightning_asyncpp.core.optimizers.fitness import (
    delayed_problems,
    sparse_problems,
    stage_problems,
    state_problems,
)
from lightning_asyncpp.core.optimizers.probe import GLOBAL, LOSS, RANDOM, SEVERAL, examine, is_known
from lightning_asyncpp.core.optimizers.steps import OneGradient
from lightning_asyncpp.errors import ConfigurationError

Make = Callable[[Any], torch.optim.Optimizer]


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(3, 2, 3, 3), (16, 8), (16,), (16, 16), (16,), (4, 16)]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def named(make: Any, **options: Any) -> Make:
    return lambda params: make([(f"{i}.weight", p) for i, p in enumerate(params)], **options)


class Sam(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        climbed = [(p, 0.05 * p.grad.sign()) for p in held]
        for p, by in climbed:
            p.add_(by)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, by in climbed:
            p.sub_(by)
        return super().step()


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.add_(torch.from_numpy(np.random.randn(*p.shape)).to(p.dtype))
        return loss


class Averaged(torch.optim.SGD):
    """Divides by the number of parameters: gradients tell nothing of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad /= len(group["params"])
        return super().step()


class ByGroup(torch.optim.SGD):
    """Clips every group by its norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.1)
        super().step()
        return loss


class Silent(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step()


def each_in_a_group(params: Any) -> torch.optim.Optimizer:
    return ByGroup([{"params": [p]} for p in params], lr=0.1)


def around(base: Any) -> Make:
    return lambda params: own.ErrorFeedback(params, base)


FINDINGS: list[tuple[Make, str]] = [
    (pytorch_optimizer.Prodigy, GLOBAL),
    (around(pytorch_optimizer.Prodigy), GLOBAL),
    (functools.partial(pytorch_optimizer.Adan, max_grad_norm=0.1), GLOBAL),
    (functools.partial(pytorch_optimizer.Adan, max_grad_norm=0.0), ""),
    (functools.partial(pytorch_optimizer.DAdaptAdam, lr=1.0), GLOBAL),
    (each_in_a_group, GLOBAL),
    (functools.partial(Averaged, lr=0.1), GLOBAL),
    (functools.partial(Noisy, lr=0.1), RANDOM),
    (pytorch_optimizer.Kron, RANDOM),
    (functools.partial(Sam, lr=0.1), SEVERAL),
    (lambda p: pytorch_optimizer.SAM(p, torch.optim.SGD, lr=0.1), SEVERAL),
    (torch.optim.LBFGS, SEVERAL),
    (pytorch_optimizer.AliG, LOSS),
    (pytorch_optimizer.ScheduleFreeAdamW, ""),
    (lambda p: pytorch_optimizer.Lookahead(torch.optim.AdamW(p)), ""),
    (pytorch_optimizer.SOAP, ""),
]


@pytest.mark.parametrize(("make", "kind"), FINDINGS)
@pytest.mark.parametrize("count", [6, 1])
def test_what_is_found(make: Make, kind: str, count: int) -> None:
    """On a stage with a single parameter, too."""
    verdict = examine(make(weights()[1 : count + 1]))
    assert (verdict.kind, verdict.unknown) == (kind, "")


KNOWN: dict[str, Make] = {
    name: getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
}
KNOWN |= {"Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2]), "Adafactor": torch.optim.Adafactor}
KNOWN |= {name: named(getattr(own, name), lr=0.01) for name in ("SOAP", "MuonAdamW")}
KNOWN |= {"NorMuonAdamW": named(own.NorMuonAdamW, lr=0.01)}
KNOWN |= {
    "ErrorFeedback": around(torch.optim.AdamW),
    "WeightPrediction": lambda p: own.WeightPrediction(p, torch.optim.AdamW),
}


@pytest.mark.parametrize("name", KNOWN)
def test_those_that_are_not_examined_would_pass(name: str) -> None:
    optimizer = KNOWN[name](weights())
    assert is_known(optimizer)
    verdict = examine(optimizer)
    assert (verdict.kind, verdict.unknown, verdict.calls_closure) == ("", "", True)
    assert state_problems(optimizer) == []


def test_a_subclass_a_hook_and_another_step_are_not_known() -> None:
    assert not is_known(ByGroup(weights(), lr=0.1))
    hooked, patched, scheduled = (torch.optim.SGD(weights(), lr=0.1) for _ in range(3))
    hooked.register_step_pre_hook(lambda optimizer, args, kwargs: None)
    patched.step = lambda closure=None: None  # type: ignore[method-assign]
    torch.optim.lr_scheduler.LambdaLR(scheduled, lambda t: 1.0)
    assert [is_known(o) for o in (hooked, patched, scheduled)] == [False, False, True]
    assert examine(patched).unknown == "its step() was replaced"


def trained(looked_at: bool, make: Make) -> list[Tensor]:
    params = weights()
    optimizer = make(params)
    torch.manual_seed(3)
    for step in range(4):
        if looked_at and step in (0, 2):  # with state, too
            examine(optimizer)
            state_problems(optimizer)
        for p in params:
            p.grad = torch.randn(p.shape)
        optimizer.step()
    return params


@pytest.mark.parametrize(
    "make",
    [
        pytorch_optimizer.Prodigy,
        around(pytorch_optimizer.AdamP),
        functools.partial(Noisy, lr=0.1),
        lambda p: pytorch_optimizer.Lookahead(torch.optim.AdamW(p), k=2),
    ],
)
def test_looking_leaves_no_trace(make: Make) -> None:
    np.random.seed(0)
    alone = trained(False, make)
    np.random.seed(0)
    assert all(torch.equal(a, b) for a, b in zip(alone, trained(True, make)))


def test_it_is_quick_for_many_parameters() -> None:
    optimizer = pytorch_optimizer.AdamP([nn.Parameter(torch.randn(64, 64)) for _ in range(400)])
    start = time.perf_counter()
    assert examine(optimizer).kind == ""
    assert time.perf_counter() - start < 2.0  # 0.1 on an idle machine


def test_the_words() -> None:
    [said] = stage_problems(around(pytorch_optimizer.Prodigy)(weights()), with_closure=False)
    assert said.startswith("ErrorFeedback(Prodigy) computes over all of its parameters")
    assert "delayed_gradient" in said
    assert delayed_problems(pytorch_optimizer.Prodigy(weights())) == []
    [said] = delayed_problems(Sam(weights(), lr=0.1))
    assert said.startswith("Sam evaluates the loss several times per step")
    assert stage_problems(Silent(weights(), lr=0.1), with_closure=False) == []
    [said] = stage_problems(Silent(weights(), lr=0.1), with_closure=True)
    assert "never evaluates its closure" in said
    optimizer = torch.optim.SGD(params := weights(), lr=0.1)
    optimizer.register_step_pre_hook(lambda o, a, k: torch.nn.utils.clip_grad_norm_(params, 0.1) and None)
    with pytest.warns(UserWarning, match="SGD could not be examined before training: it has step hooks"):
        stage_problems(optimizer, with_closure=False)


def test_the_guard_at_run_time() -> None:
    optimizer = Sam(weights(), lr=0.1)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    with pytest.raises(ConfigurationError, match="changes weights or gradients before"):
        optimizer.step(OneGradient(optimizer))
    unused = OneGradient(torch.optim.SGD(weights(), lr=0.1))
    with pytest.raises(ConfigurationError, match="never evaluates its closure"):
        unused.check_called()


def test_states_of_another_form() -> None:
    [said] = state_problems(pytorch_optimizer.Lookahead(torch.optim.AdamW(weights())))
    assert "the state_dict() of Lookahead" in said
    assert "no 'state' and no 'param_groups'" in said
    assert state_problems(pytorch_optimizer.ScheduleFreeAdamW(weights())) == []
    assert state_problems(around(pytorch_optimizer.ScheduleFreeAdamW)(weights())) == []


@pytest.mark.parametrize("make", [functools.partial(torch.optim.AdamW, lr=0.1), named(own.MuonAdamW, lr=0.1)])
def test_an_optimizer_of_nothing(make: Make) -> None:
    with pytest.raises(ValueError, match=r"empty parameter list|there are no parameters"):
        make([])
    with EmptyOptimizers():
        optimizer = make([])
    assert all(map(is_placeholder, (p for group in optimizer.param_groups for p in group["params"])))
    optimizer.step()
    with pytest.raises(ValueError, match=r"empty parameter list|there are no parameters"):
        make([])


def test_corrections_have_the_modes_of_their_base() -> None:
    feedback = around(pytorch_optimizer.ScheduleFreeAdamW)(weights())
    feedback.eval()  # type: ignore[attr-defined]
    feedback.train()  # type: ignore[attr-defined]
    assert not hasattr(around(torch.optim.AdamW)(weights()), "train")


def test_layers_with_sparse_gradients() -> None:
    frozen = nn.Embedding(4, 2, sparse=True).requires_grad_(False)
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), frozen, nn.Embedding(4, 2))
    [said] = sparse_problems(model)
    assert said.startswith("0 (Embedding) has sparse=True")


NOT_SEPARABLE = {
    GLOBAL: "adagc adai adams asgd avagrad dadaptadagrad dadaptadam dadaptadan dadaptlion dadaptsgd prodigy",
    RANDOM: "dash gravity kron magma",
    LOSS: "alig emofact emolynx emonavi",
    SEVERAL: "lbfgs",
}


@pytest.mark.slow
def test_every_optimizer_of_pytorch_optimizer_as_the_page_has_it() -> None:
    found: dict[str, list[str]] = {}
    for name in pytorch_optimizer.get_supported_optimizers():
        try:
            optimizer = pytorch_optimizer.load_optimizer(name)(weights())
        except Exception:  # it needs more than parameters
            continue
        verdict = examine(optimizer)
        if not verdict.unknown:
            found.setdefault(verdict.kind, []).append(name)
    separable = found.pop("")
    assert {kind: " ".join(sorted(names)) for kind, names in found.items()} == NOT_SEPARABLE
    assert len(separable) > 80

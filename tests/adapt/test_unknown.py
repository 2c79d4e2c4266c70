"""Who asks for a value that is on another stage is told so; whoever computes with it gets NaN."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp import ConfigurationError, apply_layers, pipelined
from lightning_asyncpp.adapt.unknown import Unknown, UnknownValueError
from tests.adapt.test_forwards import DIM, Net

KNOWN = torch.arange(6.0).view(2, 3)

QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "gt": lambda x: x > 1,
    "a result's": lambda x: torch.tanh(x.mean() * 2 + 1) > 0.5,
    "a view's": lambda x: x[:, :1].reshape(-1).isnan(),
    "bool": lambda x: bool(x.sum()),
    "item": lambda x: x.max().item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x * 2),
    "argmax": lambda x: x.argmax(-1),
    "to whole numbers": lambda x: x.long(),
    "condition": lambda x: torch.where(x.bool(), KNOWN, 0.0),
    "equal": lambda x: torch.equal(x, KNOWN),
    "allclose": lambda x: torch.allclose(x, KNOWN),
    "isfinite": lambda x: torch.isfinite(x).all(),
    "nan_to_num": lambda x: torch.nan_to_num(x),
    "nansum": lambda x: x.nansum(),
    "fmax": lambda x: torch.fmax(x, KNOWN),
    "sign": lambda x: x.sign(),
    "bucketize": lambda x: torch.bucketize(x, KNOWN[0]),
    "unique": lambda x: x.unique(),
    "indices of the largest": lambda x: KNOWN[:, x.topk(1).indices[0]],
    "indices of an order": lambda x: x.sort().indices + 1,
    "written into something": lambda x: KNOWN.clone().copy_(x) > 1,
    "written into a part": lambda x: _with_part(x) > 1,
    "written into one of several": lambda x: _added(x) > 1,
    "written over whole numbers": lambda x: torch.zeros(2, 3, dtype=torch.long).copy_(x),
    "joined with others": lambda x: torch.cat([KNOWN, x]).amax() > 1,
    "a loop's": lambda x: list(range(int(x.sum()))),
}  # fmt: skip

COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x + KNOWN,
    "largest": lambda x: x.max(dim=-1).values,
    "largest ones": lambda x: x.topk(2).values,
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "norm": lambda x: nn.functional.layer_norm(x, (3,)),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "bf16": lambda x: x.bfloat16(),
    "complex": lambda x: torch.view_as_complex(x[:, :2].contiguous()),
}

FACTS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: (x.shape, x.size(0), x.numel(), x.dim(), x.stride()),
    "dtype": lambda x: (x.dtype, x.is_floating_point(), x.requires_grad, x.device),
    "of its shape": lambda x: torch.ones_like(x) > 0.5,
    "of its dtype": lambda x: x.new_zeros(4).sum().item(),
    "drawn": lambda x: torch.rand_like(x) > 0.5,
    "masked": lambda x: torch.arange(x.shape[0])[None] > 0,
}


def _with_part(x: Tensor) -> Tensor:
    whole = torch.zeros(4, 3)
    whole[1:3] = x
    return whole


def _added(x: Tensor) -> Tensor:
    several = [torch.zeros(2, 3), torch.zeros(2, 3)]
    torch._foreach_add_(several, [x, x])
    return several[1]


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_raise(name: str) -> None:
    unknown = Unknown()
    x = unknown.nothing("what blocks.3 returned", (2, 3), torch.float32)
    with unknown, pytest.raises(UnknownValueError, match=r"takes what blocks\.3 returned for a question \(\w+\)"):
        QUESTIONS[name](x)
    with unknown:
        QUESTIONS[name](KNOWN + 1.0)


@pytest.mark.parametrize("name", COMPUTED)
def test_results_are_nan(name: str) -> None:
    unknown = Unknown()
    x = unknown.nothing("weight", (2, 3), torch.float32)
    with unknown:
        y = COMPUTED[name](x)
    assert y.isnan().any()
    assert (y.isnan() | (y == 0)).all(), "zeros are those of dropout"
    with unknown, pytest.raises(UnknownValueError):
        bool(y.abs().sum())


@pytest.mark.parametrize("name", FACTS)
def test_facts_are_answered(name: str) -> None:
    unknown = Unknown()
    x = unknown.nothing("weight", (2, 3), torch.float32)
    with unknown:
        FACTS[name](x)


def test_whole_numbers_hold_no_nan_and_are_never_computed_with() -> None:
    unknown = Unknown()
    x = unknown.nothing("positions", (2, 3), torch.int64)
    with unknown:
        assert x.view(-1)[2:4].T.shape == (2,)
        for ask in (lambda: x + 1, lambda: x.float(), lambda: KNOWN[x], lambda: x.clone(), lambda: x[0, 0].item()):
            with pytest.raises(UnknownValueError, match="takes positions for a question"):
                ask()


def test_nothing_is_remembered_of_another_forward() -> None:
    unknown = Unknown()
    x = unknown.nothing("weight", (2, 3), torch.float32)
    unknown.forget()
    with unknown:
        assert not (x > 1).any()


class Noting(Unknown):
    """Counts what it looks at."""

    count = 0

    def __torch_dispatch__(self, *call: Any, **options: Any) -> Any:
        self.count += 1
        return super().__torch_dispatch__(*call, **options)


def test_nothing_is_looked_at_while_it_is_set_aside() -> None:
    unknown, counts = Noting(), []
    x = unknown.nothing("weight", (2, 3), torch.float32)
    with unknown:
        unknown.set_aside(x.add, 1)
        counts.append(unknown.count)
        x + 1
        counts.append(unknown.count)
        with pytest.raises(ZeroDivisionError):
            unknown.set_aside(lambda: 1 / 0)
        for ask in (lambda: x > 1, lambda: x.tolist()):
            with pytest.raises(UnknownValueError):
                ask()
    assert counts == [0, 1]


class Deciding(Net):
    """Where a certain number occurs, it decides by a value that came before its blocks."""

    asks: Callable[[nn.Module, Tensor, Tensor], Tensor]

    def forward(self, x: Tensor, numbers: Tensor, image: Tensor) -> Tensor:
        first = h = self.entry(x)
        for block in self.blocks:
            h = block(h)
        if (numbers == 7).any():
            h = h * self.asks(first, image)
        return self.out(h)


ASKS: dict[str, Callable[..., Tensor]] = {
    "argument 2": lambda model, first, image: (image > 0).float().mean(),
    "what entry returned": lambda model, first, image: (first.norm() > 1e-3).float(),
    r"what blocks\.0 returned": lambda model, first, image: (model.first.mean() > 0).float(),
    r"entry\.weight": lambda model, first, image: (model.entry.weight.sum() > 0).float(),
}


@pytest.mark.parametrize("what", ASKS)
def test_code_that_the_example_did_not_run(what: str) -> None:
    """It decided by comparing NaN, and trained wrong."""
    torch.manual_seed(2)

    def make(numbers: Tensor) -> nn.Module:
        model = Deciding()
        model.asks = ASKS[what].__get__(model)  # type: ignore[method-assign]
        if "blocks" in what:
            model.blocks[0].register_forward_hook(lambda *_: None)
            model = _keeping_first(model)
        return pipelined(model, (x, numbers, image))

    x, image = torch.randn(2, DIM), torch.randn(2, 3, DIM)
    without, seven = torch.tensor([1, 2]), torch.tensor([1, 7])
    model = make(without)
    assert torch.equal(apply_layers(model, x, without, image), model(x, without, image))
    with pytest.raises(ConfigurationError, match=f"takes {what} for a question .* give an example that is like"):
        apply_layers(model, x, seven, image)
    assert torch.equal(apply_layers(model, x, without, image), model(x, without, image)), "and goes on"
    model = make(seven)
    for numbers in (seven, without):
        assert torch.equal(apply_layers(model, x, numbers, image), model(x, numbers, image))


def _keeping_first(model: Deciding) -> Deciding:
    class Noting(Deciding):
        def forward(self, x: Tensor, numbers: Tensor, image: Tensor) -> Tensor:
            h = self.entry(x)
            for number, block in enumerate(self.blocks):
                h = block(h)
                if number == 0:
                    first = h
            if (numbers == 7).any():
                h = h * (first.mean() > 0).float()
            return self.out(h)

    model.__class__ = Noting
    return model


def test_the_model_can_be_copied() -> None:
    x = torch.randn(2, DIM)
    model = pipelined(Net(), (x,))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(apply_layers(other, x), model(x))

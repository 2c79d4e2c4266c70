"""Mini-batches compute norms for clipping, and pass on shared gradients in order."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, cast

import pytest
import torch

from lightning_asyncpp.core.clipping import clip_by_norm, larger
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.updates.mini_batch import MiniBatch
from lightning_asyncpp.core.updates.reduction import TiedGradients
from lightning_asyncpp.core.updates.update import StopFlags
from lightning_asyncpp.core.updates.update_queue import UpdateQueue


def launched(
    gradients: dict[str, Any], stop: StopFlags | None = None, index: int = 0, tied: TiedGradients | None = None
) -> MiniBatch:
    """Return a launched mini-batch of a single process with these gradients."""
    mini_batch = MiniBatch(Mesh(1, 1, 0), index, index, end=index + 1, weight=2.0, tied=tied)
    mini_batch.launch(gradients, torch.zeros(0), stop or StopFlags(), {})
    return mini_batch


def test_one_infinite_element_is_noticed() -> None:
    mini_batch = launched({"a": torch.ones(3), "b": torch.tensor([0.0, -math.inf, 0.0])})
    assert not mini_batch.wait().finite


def test_norms_are_summed_in_double_precision() -> None:
    gradients = {"large": torch.tensor([1e4]), "small": torch.full((1000,), 1e-2)}
    exact = math.sqrt(1e8 + 1000 * float(torch.tensor(1e-2)) ** 2) / 2
    assert launched(gradients).wait().norm == float(torch.tensor(exact, dtype=torch.float32))
    overflows = {"overflows in fp32": torch.tensor([1e30, 1e30]), "none": None}
    assert launched(overflows).wait().norm == pytest.approx(math.sqrt(0.5) * 1e30, rel=1e-6)


def test_a_complex_number_counts_by_its_absolute_value() -> None:
    assert launched({"complex": torch.tensor([3 + 4j]), "real": torch.tensor([12.0])}).wait().norm == 13 / 2


@pytest.mark.parametrize(
    ("before", "own", "expected"), [(0.5, 2.0, 0.5), (4.0, 2.0, 0.25), (0.5, 0.1, 1.0), (4.0, math.nan, 0.25)]
)
def test_a_gradient_that_has_suddenly_grown_is_clipped_ahead_too(before: float, own: float, expected: float) -> None:
    for norm in (own, torch.tensor(own, dtype=torch.float64)):  # a number, or a tensor as on a GPU
        parameter = torch.ones(3, requires_grad=True)
        parameter.grad = torch.ones(3)
        clip_by_norm([parameter], larger(before, norm), 1.0)
        assert parameter.grad.tolist() == pytest.approx([expected] * 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1000,), (10, 10)])
def test_a_norm_on_a_device_clips_as_one_on_the_host(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gradient, clipped = torch.randn(shape).to(dtype), []
    for norm in (3.0007, torch.tensor(3.0007, dtype=torch.float64)):
        parameter = torch.zeros(shape, dtype=dtype, requires_grad=True)
        parameter.grad = gradient.clone()
        clip_by_norm([parameter], norm, 1.0)
        clipped.append(parameter.grad)
    assert torch.equal(*clipped)


class ArrivesLate:
    """Fake of a mini-batch's shared gradients, which arrive after ``looks`` calls of :meth:`have_arrived`."""

    counted_by_others = names = frozenset[str]()

    def __init__(self, looks: int, passed_on: list[str], name: str) -> None:
        self.looks, self.passed_on, self.name = looks, passed_on, name

    def have_arrived(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def pass_on(self, *_: object) -> None:
        self.passed_on.append(self.name)


def test_mini_batches_pass_on_in_order() -> None:
    """If gradients arrive between the checks of two mini-batches, the second must not pass on its gradients first."""
    passed_on: list[str] = []
    queue = object.__new__(UpdateQueue)
    queue.pending, queue._sending, queue._dropped, queue._next_backward = deque(), deque(), deque(), 2
    for index, (name, looks) in enumerate({"first": 1, "second": 0}.items()):
        tied = cast("TiedGradients", ArrivesLate(looks, passed_on, name))
        queue.pending.append(launched({"a": torch.ones(2)}, index=index, tied=tied))
    queue.pending.append(MiniBatch(Mesh(1, 1, 0), 2, 2, end=3))
    queue.progress()
    assert passed_on == []
    queue.progress()
    assert passed_on == ["first", "second"]

"""What layers say beside their output reaches exactly one listener."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_asyncpp.auxiliary import COLLECTED, StatisticsLayer, add_auxiliary_loss, add_statistics, collecting


class Counter(StatisticsLayer):
    num_statistics = 2


def a_loss() -> torch.Tensor:
    return torch.ones((), requires_grad=True) * 2


def test_losses_are_collected_in_order_and_summed() -> None:
    with collecting() as said:
        add_auxiliary_loss(a_loss())
        add_auxiliary_loss(a_loss() * 3)
    assert [float(loss) for loss in said.losses] == [2.0, 6.0]
    assert float(said.total_loss()) == 8.0


def test_nothing_said_adds_nothing() -> None:
    with collecting() as said:
        pass
    assert said.total_loss() == 0.0


def test_the_innermost_collection_alone_has_the_losses() -> None:
    with collecting() as outer, collecting() as inner:
        add_auxiliary_loss(a_loss())
    assert len(inner.losses) == 1
    assert outer.losses == []


def test_statistics_add_up_and_go_outwards_unless_taken() -> None:
    layer = Counter()
    with collecting() as outer:
        with collecting():
            add_statistics(layer, torch.tensor([1, 2]))
            add_statistics(layer, torch.tensor([3, 4]))
        with collecting() as taking:
            add_statistics(layer, torch.tensor([100, 100]))
            assert taking.take_statistics()[layer].tolist() == [100.0, 100.0]
    assert outer.statistics[layer].tolist() == [4.0, 6.0]
    assert outer.statistics[layer].dtype == torch.float64


def test_what_nobody_collects_is_left_out() -> None:
    add_auxiliary_loss(a_loss())
    add_statistics(Counter(), torch.zeros(2))
    with collecting() as said:
        pass
    assert said.losses == []
    assert said.statistics == {}


def test_without_gradients_nothing_is_collected() -> None:
    with collecting() as said, torch.no_grad():
        add_auxiliary_loss(torch.ones(()))
        add_statistics(Counter(), torch.zeros(2))
    assert said.losses == []
    assert said.statistics == {}


def test_a_loss_with_dimensions_is_refused() -> None:
    with collecting(), pytest.raises(ValueError, match="without dimensions"):
        add_auxiliary_loss(torch.ones(2, requires_grad=True))


def test_what_a_backward_computes_again_is_said_once() -> None:
    layer, weight = Counter(), torch.ones(2, requires_grad=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        add_statistics(layer, torch.tensor([1, 1]))
        y = torch.sin(x * weight)
        add_auxiliary_loss(y.square().sum())
        return y

    gradients = []
    for again in (False, True):
        x = torch.tensor([0.3, 0.7], requires_grad=True)
        with collecting() as said:
            y = checkpoint(forward, x, use_reentrant=False) if again else forward(x)
        (y.sum() + said.total_loss()).backward()
        assert len(said.losses) == 1
        assert said.statistics[layer].tolist() == [1.0, 1.0]
        gradients.append((x.grad, weight.grad))
        weight.grad = None
    for first, second in zip(*gradients):
        assert torch.equal(first, second)


def test_a_failure_inside_ends_the_collection() -> None:
    with pytest.raises(KeyError), collecting():
        raise KeyError
    assert COLLECTED.get() is None


def test_counts_of_another_shape_are_refused() -> None:
    """One number for all would be spread over them without a word."""
    layer = Counter()
    with collecting(), pytest.raises(ValueError, match=r"Counter counts in 2 numbers.*shape \(1,\)"):
        add_statistics(layer, torch.ones(1))

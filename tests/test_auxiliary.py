"""Auxiliary losses and statistics that layers record reach exactly one collection."""

from __future__ import annotations

import pytest
import torch

from lightning_asyncpp.auxiliary import StatisticsLayer, add_auxiliary_loss, add_statistics, collecting


class Counter(StatisticsLayer):
    num_statistics = 2


def test_the_innermost_collection_alone_has_the_losses_summed() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    with collecting() as outer, collecting() as inner:
        add_auxiliary_loss(loss)
        add_auxiliary_loss(loss * 3)
    add_auxiliary_loss(loss)  # outside of any collection
    assert [float(loss) for loss in inner.losses] == [2.0, 6.0]
    assert (float(inner.total_loss()), outer.losses, float(outer.total_loss())) == (8.0, [], 0.0)


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


def test_without_gradients_nothing_is_collected() -> None:
    with collecting() as told, torch.no_grad():
        add_auxiliary_loss(torch.ones(()))
        add_statistics(Counter(), torch.zeros(2))
    assert (told.losses, told.statistics) == ([], {})


def test_a_loss_with_dimensions_is_refused() -> None:
    with collecting(), pytest.raises(ValueError, match="without dimensions"):
        add_auxiliary_loss(torch.ones(2, requires_grad=True))

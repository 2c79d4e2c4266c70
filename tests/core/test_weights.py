"""Two weight versions: which is alive, where gradients go, and what the optimizer steps on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_asyncpp.core import weights as weights_module
from lightning_asyncpp.core.stage_optimizer import around_step
from lightning_asyncpp.core.weights import WeightVersions


def make(room: int = 2) -> tuple[WeightVersions, nn.Parameter]:
    parameter, frozen = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(1), requires_grad=False)
    return WeightVersions({"w": parameter, "frozen": frozen}, room), parameter


def update(weights: WeightVersions, parameter: nn.Parameter, value: float) -> None:
    weights.advance()
    with torch.no_grad():
        parameter.fill_(value)


def test_only_the_newest_two_are_alive() -> None:
    weights, parameter = make()
    for version in range(1, 6):
        update(weights, parameter, float(version))
        assert weights.newest == version
        assert weights.leaves(version)["w"].tolist() == [version] * 2
        assert weights.leaves(version - 1)["w"].tolist() == [version - 1] * 2
        for dead in (version - 2, version + 1):
            with pytest.raises(RuntimeError, match=f"weight version {dead} is not alive: the newest of 2 is {version}"):
                weights.leaves(dead)


def test_an_update_does_not_touch_a_graph_on_the_version_before() -> None:
    weights, parameter = make()
    x = torch.ones(2)
    old = weights.leaves(0)["w"]
    loss = (old * old * x).sum() + (old * 3).sum()
    before = weights.advance()
    assert before is not None
    assert before[parameter] is old
    with torch.no_grad():
        parameter.fill_(7.0)
    loss.backward()
    assert weights.take_gradients() == {"w": pytest.approx(torch.full((2,), 3.0))}
    assert old.tolist() == [0.0, 0.0]
    assert parameter.grad is None


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gradients_at_both_versions_are_one_sum_that_is_handed_over_once(dtype: torch.dtype | None) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    weights = WeightVersions({"w": parameter}, 2, compute_dtype=dtype)
    weights.advance()
    for version, factor in ((0, 1.0), (0, 2.0), (1, 4.0), (1, 8.0)):
        (weights.sum_at(version)["w"] * factor).sum().backward()
    assert weights.leaves(0)["w"].grad is None, "what was summed goes along with the version"
    known = weights.gradient("w")
    assert known is not None
    assert known.tolist() == [15.0, 15.0]
    taken = weights.take_gradients()["w"]
    assert taken is not None
    assert taken.tolist() == [15.0, 15.0]
    assert weights.take_gradients() == {"w": None}
    (weights.sum_at(1)["w"] * 5).sum().backward()
    assert taken.tolist() == [15.0, 15.0], "a new sum was added to one that was handed over"
    assert [gradient.tolist() for gradient in weights.gradients_apart("w")] == [[5.0, 5.0]]


def test_the_uses_of_a_parameter_are_summed_apart_over_both_versions() -> None:
    weights = WeightVersions({"a": nn.Parameter(torch.ones(1))}, 2, uses={"b": "a"})
    weights.advance()
    for version in (0, 1):
        leaves = weights.sum_at(version)
        (leaves["a"] * 2 + leaves["b"] * 3).sum().backward()
    assert [gradient.item() for gradient in weights.gradients_apart("a")] == [6.0, 4.0], "the last layer's first"


@pytest.mark.parametrize("newest", [0, 1, 2, 5])
@pytest.mark.parametrize("room", [1, 2])
def test_restoring_goes_on_where_it_was(newest: int, room: int) -> None:
    saved, parameter = make(room)
    for version in range(1, newest + 1):
        update(saved, parameter, float(version))
    older = saved.older()
    assert (older is None) == (room == 1 or newest == 0)
    weights, loaded = make(room)
    with torch.no_grad():
        loaded.copy_(parameter)
    weights.restore(newest, {"w": older["w"].clone()} if older else None)
    for _ in range(3):
        assert weights.newest == saved.newest
        for version in range(max(0, weights.newest - room + 1), weights.newest + 1):
            assert torch.equal(weights.leaves(version)["w"], saved.leaves(version)["w"])
        assert loaded.data_ptr() == weights.leaves(weights.newest)["w"].data_ptr()
        update(saved, parameter, saved.newest + 10.0)
        update(weights, loaded, weights.newest + 10.0)


def test_masters_stay_and_versions_are_kept_in_the_compute_dtype() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    weights = WeightVersions({"w": parameter}, 2, compute_dtype=torch.bfloat16)
    memory = parameter.data_ptr()
    assert weights.leaves(0)["w"].dtype == torch.bfloat16
    assert weights.advance() is None  # nobody keeps the masters of before
    with around_step(None, None, weights.compute_weights()), torch.no_grad():
        parameter.add_(1 / 1024)
    assert parameter.data_ptr() == memory
    assert parameter.tolist() == [1 + 1 / 1024, 2 + 1 / 1024]
    assert weights.leaves(1)["w"].tolist() == [1.0, 2.0]  # rounded
    assert weights.shown()["w"].dtype == torch.bfloat16
    assert torch.equal(weights.masters()["w"], parameter.detach())  # type: ignore[index]


def test_gradients_of_bf16_leaves_are_summed_in_fp32() -> None:
    parameter = nn.Parameter(torch.ones(1))
    weights = WeightVersions({"w": parameter}, 2, compute_dtype=torch.bfloat16)
    for factor in (256.0, 1.0):  # 257 is no number of bf16
        (weights.leaves(0)["w"] * factor).sum().backward()
    assert weights.leaves(0)["w"].grad is None
    gradient = weights.take_gradients()["w"]
    assert gradient is not None
    assert gradient.dtype == torch.float32
    assert gradient.tolist() == [257.0]
    assert weights.take_gradients()["w"] is None


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_at_the_end_all_versions_come_to_the_host(dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would keep their memory of the GPU; the parameters, which came there before, stay the newest version."""
    parameter = nn.Parameter(torch.tensor([1.0]))
    weights = WeightVersions({"w": parameter}, 2, uses={"u": "w"}, compute_dtype=dtype)
    weights.advance()
    with around_step(None, None, weights.compute_weights()), torch.no_grad():
        parameter.fill_(2.0)
    on_device = {leaf.data_ptr() for version in (0, 1) for leaf in weights.leaves(version).values()}
    monkeypatch.setattr(weights_module, "on_host", lambda tensor: tensor.detach().clone())
    parameter.data = parameter.data.clone()  # as Lightning moves the module
    weights.to_host()
    after = [leaf for version in (0, 1) for leaf in weights.leaves(version).values()]
    assert [leaf.item() for leaf in after] == [1.0, 1.0, 2.0, 2.0]
    assert not on_device & {leaf.data_ptr() for leaf in after}
    assert (parameter.data_ptr() == weights.leaves(1)["w"].data_ptr()) == (dtype is None)

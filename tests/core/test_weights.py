"""All weight versions move to the host, and the newest adopts changes of parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_asyncpp.core.stage_optimizer import around_step
from lightning_asyncpp.core.weights import WeightVersions


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_at_the_end_all_versions_come_to_the_host(dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would keep GPU memory. Without masters the parameters, moved before, stay the newest version."""
    parameter = nn.Parameter(torch.tensor([1.0]))
    weights = WeightVersions({"w": parameter}, 2, uses={"u": "w"}, compute_dtype=dtype)
    weights.advance()
    with around_step(None, None, weights.copies_of_masters()), torch.no_grad():
        parameter.fill_(2.0)
    on_device = {leaf.data_ptr() for version in (0, 1) for leaf in weights.leaves(version).values()}
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)  # as if the tensor were on a device
    parameter.data = parameter.data.clone()  # as Lightning moves the module
    weights.to_host()
    after = [leaf for version in (0, 1) for leaf in weights.leaves(version).values()]
    assert [leaf.item() for leaf in after] == [1.0, 1.0, 2.0, 2.0]
    assert not on_device & {leaf.data_ptr() for leaf in after}
    assert (parameter.data_ptr() == weights.leaves(1)["w"].data_ptr()) == (dtype is None)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_a_hook_changes_is_in_the_newest_version_alone(dtype: torch.dtype | None) -> None:
    """This also holds if the parameter's data was replaced."""
    parameter = nn.Parameter(torch.tensor([1.0]))
    weights = WeightVersions({"w": parameter}, 2, compute_dtype=dtype)
    weights.advance()
    with torch.no_grad():
        if dtype is None:
            parameter.data = torch.tensor([3.0])
        else:
            parameter.fill_(3.0)
    weights.adopt()
    assert [weights.leaves(version)["w"].item() for version in (0, 1)] == [1.0, 3.0]
    assert (parameter.data_ptr() == weights.leaves(1)["w"].data_ptr()) == (dtype is None)

"""What names a device names the one of its tensors: run for a GPU on tensors that have a device and no memory.

Such a tensor refuses to be computed with one of another device, and needs no CUDA. torch's autograd engine does need
it, so backwards are not run here; gradients are made up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_asyncpp.core import foreach
from lightning_asyncpp.core.clipping import clip_values
from lightning_asyncpp.core.cut.cutting import cut
from lightning_asyncpp.core.stage_optimizer import around_step
from lightning_asyncpp.core.weights import WeightVersions
from lightning_asyncpp.core.wire import handover
from lightning_asyncpp.core.wire.handover import Way
from lightning_asyncpp.core.wire.link import TensorInfo
from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW, NorMuonAdamW, newton_schulz
from lightning_asyncpp.tools.plan.fake_tensors import FakeTensorMode  # which cross cuts

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def without_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Values are made up; what has no meaning without a driver (generators, a kernel) is left out."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = type(torch.empty(1))
        monkeypatch.setattr(fake, "item", lambda self: 1.0 if self.is_floating_point() else 1)
        monkeypatch.setattr(fake, "tolist", lambda self: [1.0] * self.numel())
        monkeypatch.setattr(fake, "__bool__", lambda self: False, raising=False)
        monkeypatch.setattr(newton_schulz, "_may_have_kernel", lambda *_: False)
        for name in ("seed_generators", "generator_states", "set_generator_states"):
            for module in [m for n, m in sys.modules.items() if n.startswith("lightning_asyncpp.core")]:
                monkeypatch.setattr(module, name, lambda *_: None, raising=False)
        yield


class Distributed:
    """Stands for ``torch.distributed`` with NCCL: tensors are on the GPU."""

    def isend(self, tensor: Tensor, peer: int, group: object) -> Mock:
        assert tensor.device == CUDA
        return Mock()

    irecv = isend


def test_devices_that_are_mixed_are_found() -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.zeros(2, device=CUDA) + torch.zeros(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64])
def test_messages(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(handover, "dist", Distributed())
    way = Way(1, None, CUDA, None)  # type: ignore[arg-type]
    sent = torch.zeros(2, 3, 4, dtype=dtype, device=CUDA).permute(1, 2, 0)
    info = TensorInfo.of(sent)
    way.send([info.stored(sent).contiguous()], None)
    (received,) = way.receive([info], way.allocate([info]))
    assert (received.shape, received.dtype, received.device) == (sent.shape, dtype, CUDA)
    assert received.stride() == sent.stride()


@pytest.mark.parametrize("index", range(3))
def test_a_stage_is_materialised_on_its_device(index: int) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=16, context_length=8, num_layers=4, dim=8, num_heads=2, mlp_dim=16))
    stage = cut(model, index, 3, 0, CUDA)
    assert {p.device for p in stage.parameters.values()} == {CUDA}


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda named: AdamW([p for _, p in named], lr=0.1),
    "normuon": lambda named: NorMuonAdamW(named, lr=0.1),
    "muon with feedback in bf16": lambda named: ErrorFeedback(
        named, lambda params: MuonAdamW(params, lr=0.1), buffer_dtype="bfloat16"
    ),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_keeps_all_on_the_device(name: str, dtype: torch.dtype | None) -> None:
    """As :class:`UpdateQueue` and the session make them, twice: corrections begin with the second."""
    with torch.device(CUDA):
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 12), nn.LayerNorm(12), nn.Linear(12, 4))
    optimizer = OPTIMIZERS[name](list(model.named_parameters()))
    if callable(set_delay := getattr(optimizer, "set_delay", None)):
        set_delay(1)
    weights = WeightVersions(dict(model.named_parameters()), 2, compute_dtype=dtype)
    for _ in range(2):
        before = weights.advance()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        foreach.divide_([p.grad for p in model.parameters()], 3.0)  # type: ignore[misc]
        clip_values(model.parameters(), 1.0)
        with around_step(optimizer, before, weights.compute_weights()):
            optimizer.step()
    kept = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.ndim]
    assert {tensor.device for tensor in [*kept, *weights.leaves(2).values()]} == {CUDA}

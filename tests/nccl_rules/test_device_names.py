"""What names a device names the one of its tensors: run for a GPU on tensors that have a device and no memory.

Such a tensor refuses to be computed with one of another device, and needs no CUDA. torch's autograd engine does need
it, so backwards are not run here; gradients are made up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from lightning_asyncpp.core import foreach
from lightning_asyncpp.core.clipping import clip_values
from lightning_asyncpp.core.cut.cutting import cut
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.microbatch import UserHooks
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.runner import Flight, Task, stage_runner
from lightning_asyncpp.core.stage_optimizer import around_step
from lightning_asyncpp.core.updates import mini_batch, reduction
from lightning_asyncpp.core.updates.mini_batch import MiniBatch, StopFlags
from lightning_asyncpp.core.updates.reduction import Reduction, plan_buckets
from lightning_asyncpp.core.weights import WeightVersions
from lightning_asyncpp.core.wire import handover
from lightning_asyncpp.core.wire.handover import Way
from lightning_asyncpp.core.wire.link import Header, TensorInfo
from lightning_asyncpp.core.wire.transport import Arrival, arrived_at
from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW, NorMuonAdamW, newton_schulz
from lightning_asyncpp.tools.plan.fake_tensors import FakeTensorMode  # which cross cuts

CUDA = torch.device("cuda", 0)
CONFIG = GPTConfig(vocab_size=16, context_length=8, num_layers=4, dim=8, num_heads=2, mlp_dim=16)
STAGES, TOKENS = 3, (2, 8)


@pytest.fixture(autouse=True)
def without_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Values are made up; what has no meaning without a driver (generators, a kernel) is left out."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = type(torch.empty(1))
        monkeypatch.setattr(fake, "item", lambda self: 1.0 if self.is_floating_point() else 1)
        monkeypatch.setattr(fake, "tolist", lambda self: [1.0] * self.numel())
        monkeypatch.setattr(fake, "__bool__", lambda self: False, raising=False)
        monkeypatch.setattr(newton_schulz, "_may_have_kernel", lambda *_: False)
        for module in [m for n, m in sys.modules.items() if n.startswith("lightning_asyncpp.core")]:
            for name in ("seed_generators", "generator_states", "set_generator_states"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, lambda *_: None)
        yield


class Work:
    """Stands for a ``dist.Work`` that is done."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Work:
        return self

    def add_done_callback(self, call: Callable[[object], None]) -> None:
        call(None)


class Distributed:
    """Stands for ``torch.distributed`` with NCCL: tensors are on the GPU."""

    def isend(self, tensor: Tensor, peer: int, group: object) -> Work:
        return self._given(tensor)

    def irecv(self, tensor: Tensor, peer: int, group: object) -> Work:
        return self._given(tensor)

    def all_reduce(self, tensor: Tensor, group: object, async_op: bool) -> Work:
        return self._given(tensor)

    def _given(self, tensor: Tensor) -> Work:
        assert tensor.device == CUDA
        return Work()


class Neighbours:
    """Stands for the transport of a stage: what arrives is on the GPU, and so is what is sent."""

    def receive_activation(self, k: int) -> Arrival:
        info = TensorInfo((*TOKENS, CONFIG.dim), torch.float32, True)
        return Arrival(Header(k, weight=2.0, tensors=(info,)), (info.empty(CUDA),))

    def send_activation(self, header: Any, tensors: tuple[Tensor, ...]) -> None:
        assert [tensor.device for tensor in tensors] == [CUDA] * len(header.tensors)

    def receive_gradients(self, k: int, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        return [TensorInfo.of(tensor).empty(CUDA) for tensor in outputs]


def test_devices_that_are_mixed_are_found() -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.zeros(2, device=CUDA) + torch.zeros(2)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex64]
)
def test_messages(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(handover, "dist", Distributed())
    way = Way(1, None, CUDA, None)  # type: ignore[arg-type]
    sent = torch.zeros(2, 3, 4, dtype=dtype, device=CUDA).permute(1, 2, 0)
    info = TensorInfo.of(sent)
    way.send([info.stored(sent).contiguous()], None)
    (received,) = way.receive([info], way.allocate([info]))
    assert (received.shape, received.dtype, received.device) == (sent.shape, dtype, CUDA)
    assert received.stride() == sent.stride()


def stage_of(index: int) -> Stage:
    with torch.device("meta"):
        model = GPT(CONFIG)
    return cut(model, index, STAGES, 0, CUDA)


@pytest.mark.parametrize("index", range(STAGES))
def test_a_stage_is_materialised_on_its_device(index: int) -> None:
    devices = {p.device for p in stage_of(index).parameters.values()}
    assert devices == {CUDA}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("index", range(STAGES))
def test_a_forward_and_where_its_backward_begins(index: int, bf16: bool) -> None:
    stage = stage_of(index)
    mesh = Mesh(STAGES, 1, STAGES - 1 - index)
    hooks = UserHooks(microbatch_weight=lambda batch: 2.0)
    if bf16:
        hooks = UserHooks(
            microbatch_weight=lambda batch: 2.0, forward_context=lambda: torch.autocast("cuda", torch.bfloat16)
        )
    runner = stage_runner(stage, mesh, Neighbours(), hooks, 0, CUDA)  # type: ignore[arg-type]
    weights = WeightVersions(stage.parameters, 2, stage.uses, stage.buffers, torch.bfloat16 if bf16 else None)
    slot = None if 0 < index < STAGES - 1 else torch.zeros(TOKENS, dtype=torch.int64, device=CUDA)

    def step(batch: Tensor, weight: float | None) -> Tensor:
        logits = stage.model(batch)
        return F.cross_entropy(logits.flatten(0, 1).float(), batch.flatten())

    flight: Flight = runner.forward(Task(0, 0, weights.leaves(0), slot, 0, step))
    gradients = runner._output_gradients(flight)
    assert [g.device for g in gradients] == [o.device for o in flight.outputs] == [CUDA]
    assert [arrived_at(node).device for node in flight.inputs] == [CUDA] * (index > 0)


def layers() -> nn.Module:
    with torch.device(CUDA):
        return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 12), nn.LayerNorm(12), nn.Linear(12, 4))


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda named: AdamW([p for _, p in named], lr=0.1),
    "muon": lambda named: MuonAdamW(named, lr=0.1),
    "normuon": lambda named: NorMuonAdamW(named, lr=0.1),
    "muon with feedback": lambda named: ErrorFeedback(named, lambda params: MuonAdamW(params, lr=0.1)),
    "adamw with feedback in bf16": lambda named: ErrorFeedback(
        [p for _, p in named], lambda params: AdamW(params, lr=0.1), buffer_dtype="bfloat16"
    ),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates(name: str, dtype: torch.dtype | None) -> None:
    """As :class:`UpdateQueue` and the session make them, twice: corrections begin with the second."""
    model = layers()
    optimizer = OPTIMIZERS[name](list(model.named_parameters()))
    if callable(set_delay := getattr(optimizer, "set_delay", None)):
        set_delay(1)
    weights = WeightVersions(dict(model.named_parameters()), 2, compute_dtype=dtype)
    for t in range(2):
        for leaf in weights.sum_at(max(0, t - 1)).values():
            if dtype is None:
                leaf.grad = torch.zeros_like(leaf)
        gradients = weights.take_gradients()
        gradients = {n: torch.zeros_like(p) for n, p in model.named_parameters()}  # a backward's, with masters
        before = weights.advance()
        foreach.divide_(list(gradients.values()), 3.0)  # type: ignore[arg-type]
        for n, parameter in model.named_parameters():
            parameter.grad = gradients[n]
        clip_values(model.parameters(), 1.0)
        with around_step(optimizer, before, weights.compute_weights()):
            optimizer.step()
    kept = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.ndim]
    assert {tensor.device for tensor in [*kept, *weights.leaves(2).values()]} == {CUDA}


class MadeUp:
    """Numbers in the place of those that pinned memory would bring to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        assert len({tensor.device for tensor in tensors}) == 1
        self._numbers = [[1.0] * tensor.numel() for tensor in tensors]

    def is_there(self) -> bool:
        return True

    def get(self) -> list[list[float]]:
        return self._numbers


def test_gradients_of_replicas_and_the_control_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "dist", Distributed())
    for module in (reduction, mini_batch):
        monkeypatch.setattr(module, "Reading", MadeUp)
    model = layers()
    parameters = dict(model.named_parameters())
    gradients: dict[str, Tensor | None] = {name: torch.zeros_like(p) for name, p in parameters.items()}
    gradients["1.bias"] = None
    buckets = plan_buckets(parameters, bucket_bytes=64)
    reducing = Reduction(buckets, None)  # type: ignore[arg-type]
    reducing.send_rest(gradients)
    assert reducing.poll()
    assert {g.device for g in reducing.gradients.values() if g is not None} == {CUDA}
    launched = MiniBatch(Mesh(1, 1, 0), 0, 0, weight=2.0)
    launched.complete(1, num_statistics=0)
    launched.launch(gradients, torch.zeros(0, dtype=torch.float64), StopFlags(), {})
    assert launched.poll()
    assert launched.message is not None
    assert launched.message.device.type == "cpu"

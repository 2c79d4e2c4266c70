"""Checkpointed and compiled blocks compute what plain ones do, record statistics once, and follow weight versions."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_asyncpp.auxiliary import collecting
from lightning_asyncpp.models import GPT, GPTConfig, MoEConfig

SHAPE = {"vocab_size": 31, "context_length": 16, "num_layers": 3, "dim": 16, "num_heads": 2, "mlp_dim": 24}
MOE = MoEConfig(num_experts=4, expert_dim=8, num_shared_experts=1, router="sigmoid", num_dense_layers=1)
CONFIGS = {"dense": GPTConfig(**SHAPE, dropout=0.2), "experts": GPTConfig(**SHAPE, dropout=0.2, moe=MOE)}
TOKENS = torch.arange(32).view(2, 16) * 7 % 31


def built(kind: str, **options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIGS[kind], **options)


def trained(model: GPT, seed: int = 1) -> dict[str, Any]:
    """Run a forward and backward; return the loss, auxiliary losses, counts and gradients."""
    torch.manual_seed(seed)
    model.zero_grad()
    with collecting() as said:
        loss = F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
    (loss + said.total_loss()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    counts = {f"counts {i}": counts for i, counts in enumerate(said.statistics.values())}
    losses = {f"loss {i}": loss.detach() for i, loss in enumerate(said.losses)}
    return {"loss": loss.detach(), **losses, **counts, **gradients}


@pytest.mark.parametrize("how", ["block", "selective"])
@pytest.mark.parametrize(("kind", "autocast"), [("dense", False), ("experts", False), ("experts", True)])
def test_checkpointing_changes_no_bit(kind: str, autocast: bool, how: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain, checkpointed = trained(built(kind)), trained(built(kind, activation_checkpointing=how))
    assert checkpointed.keys() == plain.keys()
    assert ("counts 1" in plain) == (kind == "experts")
    for name, tensor in plain.items():
        assert torch.equal(checkpointed[name], tensor), name


class Calls(TorchDispatchMode):
    """Dispatch mode that counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counter: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counter[str(func.overloadpacket).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


def test_what_is_computed_again() -> None:
    counted = {}
    for how in ("none", "block", "selective"):
        loss = built("dense", activation_checkpointing=how)(TOKENS).sum()
        with Calls() as calls:
            loss.backward()
        counted[how] = calls.counter
    attention = [counter["_scaled_dot_product_flash_attention_for_cpu"] for counter in counted.values()]
    assert attention == [0, 3, 0]
    assert [counter["silu"] for counter in counted.values()] == [0, 3, 3]
    assert counted["block"]["mm"] > counted["selective"]["mm"] == counted["none"]["mm"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how", "backend"), [("dense", "block", "aot_eager"), ("experts", "selective", "inductor")]
)
def test_compiled_blocks_are_the_same(kind: str, how: Any, backend: str) -> None:
    config = copy.copy(CONFIGS[kind])
    config.dropout = 0.0  # a compiled block draws other dropout masks
    torch.manual_seed(0)
    plain = GPT(config)
    model = GPT(config, how, compile_blocks={"backend": backend, "fullgraph": True})
    model.load_state_dict(plain.state_dict())
    expected, found = trained(plain), trained(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def versions(model: GPT) -> list[dict[str, Tensor]]:
    """Return three sets of leaf tensors that are no parameters and have other values."""
    torch.manual_seed(10)
    return [
        {n: (p.detach() + 0.1 * torch.randn_like(p)).requires_grad_() for n, p in model.named_parameters()}
        for _ in range(3)
    ]


@contextmanager
def swapped(model: GPT, weights: dict[str, Tensor]) -> Iterator[None]:
    """Put other tensors in the place of the parameters, as a pipeline does with its weight versions."""
    places = [(model.get_submodule(name.rpartition(".")[0])._parameters, name.rpartition(".")[2]) for name in weights]
    originals = [holder[key] for holder, key in places]
    for (holder, key), tensor in zip(places, weights.values()):
        holder[key] = tensor  # type: ignore[assignment]
    yield
    for (holder, key), original in zip(places, originals):
        holder[key] = original


def run_versions(model: GPT, order: list[int]) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Run forwards on versions in this order, then the backwards on the same versions; return losses and gradients."""
    sets = versions(model)
    losses, totals = [], []
    for version in order:
        with swapped(model, sets[version]), collecting() as said:
            loss = F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
        losses.append(loss.item())
        totals.append(loss + said.total_loss())
    for version, total in zip(order, totals):
        with swapped(model, sets[version]):
            total.backward()
    return losses, [{name: leaf.grad for name, leaf in leaves.items()} for leaves in sets]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "backend", "kinds_of_blocks"),
    [("dense", "eager", 1), pytest.param("experts", "aot_eager", 2, marks=pytest.mark.slow)],
)
def test_weight_versions_alternate_without_compiling_again(kind: str, backend: str, kinds_of_blocks: int) -> None:
    """Blocks of one kind share a compiled graph, which serves all weight versions."""
    graphs = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    config = copy.copy(CONFIGS[kind])
    config.dropout = 0.0
    torch.compiler.reset()
    torch.manual_seed(0)
    model = GPT(config, "selective", compile_blocks={"backend": counting, "fullgraph": True})
    plain = GPT(config)
    plain.load_state_dict(model.state_dict())
    run_versions(model, [0])
    losses, gradients = run_versions(model, [0, 1, 0, 2, 1])
    assert len(graphs) == kinds_of_blocks
    expected, expected_gradients = run_versions(plain, [0, 1, 0, 2, 1])
    assert len(set(losses)) == 3
    assert losses == pytest.approx(expected, rel=1e-6)
    for found, wanted in zip(gradients, expected_gradients):
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)


def test_a_compiled_model_may_be_copied_and_pickled() -> None:
    model = built("dense", activation_checkpointing="block", compile_blocks={"backend": "eager"})
    before = trained(model)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    for again in copies:
        after = trained(again)
        assert after.keys() == before.keys()
        for name, tensor in before.items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-7)

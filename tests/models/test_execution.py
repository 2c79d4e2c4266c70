"""Checkpointed and compiled blocks compute what plain ones do, say what they say once, and know weight versions."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_asyncpp.auxiliary import collecting
from lightning_asyncpp.models import GPT, GPTConfig, MoEConfig
from lightning_asyncpp.models.grouped_linear import serves_grouped

SHAPE = {"vocab_size": 31, "context_length": 16, "num_layers": 3, "dim": 16, "num_heads": 2, "mlp_dim": 24}
MOE = MoEConfig(
    num_experts=4, expert_dim=8, num_shared_experts=1, router="sigmoid", num_dense_layers=1
)  # fmt: skip
CONFIGS = {"dense": GPTConfig(**SHAPE, dropout=0.2), "experts": GPTConfig(**SHAPE, dropout=0.2, moe=MOE)}
TOKENS = torch.arange(32).view(2, 16) * 7 % 31


def built(kind: str, **options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIGS[kind], **options)


def trained(model: GPT, seed: int = 1) -> dict[str, Any]:
    """Loss, what the layers said, and gradients of one forward and backward."""
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
@pytest.mark.parametrize("kind", CONFIGS)
def test_checkpointing_changes_no_bit(kind: str, how: Any) -> None:
    plain, checkpointed = trained(built(kind)), trained(built(kind, activation_checkpointing=how))
    assert checkpointed.keys() == plain.keys()
    assert ("counts 1" in plain) == (kind == "experts")
    for name, tensor in plain.items():
        assert torch.equal(checkpointed[name], tensor), name


@pytest.mark.parametrize("how", ["block", "selective"])
def test_checkpointing_under_autocast(how: Any) -> None:
    gradients = []
    for model in (built("experts"), built("experts", activation_checkpointing=how)):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16), collecting() as said:
            logits = model(TOKENS)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), TOKENS.flatten()) + said.total_loss()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(map(torch.equal, *gradients))


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counter: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counter[str(func.overloadpacket).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


def counted_backward(kind: str, how: Any) -> Counter[str]:
    model = built(kind, activation_checkpointing=how)
    with collecting() as said:
        loss = model(TOKENS).sum()
    loss = loss + said.total_loss()
    with Calls() as calls:
        loss.backward()
    return calls.counter


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_computed_again(kind: str) -> None:
    none, block, selective = (counted_backward(kind, how) for how in ("none", "block", "selective"))
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert none[attention] == none["silu"] == 0
    assert block[attention] == 3
    assert selective[attention] == 0
    assert block["mm"] > selective["mm"] == none["mm"]
    assert block["silu"] == selective["silu"] == {"dense": 3, "experts": 5}[kind]
    if kind == "experts":
        is_served = serves_grouped(torch.device("cpu"), torch.float32, 16, 24)
        product = "_grouped_mm" if is_served else "lightning_asyncpp.loop_linear"
        assert block[product] - none[product] == 2 * 3
        assert selective[product] == none[product]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("experts", "none"),
        pytest.param("dense", "none", marks=SLOW),
        pytest.param("experts", "selective", marks=SLOW),
        pytest.param("experts", "block", marks=SLOW),
        pytest.param("dense", "block", marks=SLOW),
        pytest.param("dense", "selective", marks=SLOW),
    ],
)
def test_compiled_blocks_are_the_same(kind: str, how: Any) -> None:
    config = copy.copy(CONFIGS[kind])
    config.dropout = 0.0  # a compiled block draws other masks
    torch.manual_seed(0)
    plain = GPT(config)
    model = GPT(config, how, compile_blocks={"backend": "aot_eager", "fullgraph": True})
    model.load_state_dict(plain.state_dict())
    assert list(model.state_dict()) == list(plain.state_dict())
    expected, found = trained(plain), trained(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["none", "block", "selective"])
def test_dropout_in_compiled_blocks_is_the_same_in_the_backward(how: Any) -> None:
    """The gradient along a direction is that of finite differences with the same masks."""
    model = built("dense", activation_checkpointing=how, compile_blocks={"backend": "aot_eager"}).double()
    weight = model.blocks[0].mlp.down.weight
    direction = torch.randn(weight.shape, dtype=torch.float64)

    def loss() -> Tensor:
        torch.manual_seed(1)
        return F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())

    (gradient,) = torch.autograd.grad(loss(), weight)
    values = []
    for step in (1e-4, -1e-4):
        with torch.no_grad():
            weight.add_(direction, alpha=step)
            values.append(float(loss()))
            weight.sub_(direction, alpha=step)
    assert (gradient * direction).sum().item() == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-5)
    assert values[0] != values[1]


class Swapped:
    """Puts other tensors in the place of the parameters, as a pipeline does with its weight versions."""

    def __init__(self, model: GPT, weights: dict[str, Tensor]) -> None:
        self.places = []
        for name in weights:
            owner, _, key = name.rpartition(".")
            self.places.append((model.get_submodule(owner)._parameters, key, weights[name]))

    def __enter__(self) -> None:
        self.originals = [holder[key] for holder, key, _ in self.places]
        for holder, key, tensor in self.places:
            holder[key] = tensor  # type: ignore[assignment]

    def __exit__(self, *error: object) -> None:
        for (holder, key, _), original in zip(self.places, self.originals):
            holder[key] = original


def versions(model: GPT) -> list[dict[str, Tensor]]:
    """Three sets of leaf tensors: no parameters, with other values."""
    sets = []
    for version in range(3):
        torch.manual_seed(10 + version)
        sets.append({n: (p.detach() + 0.1 * torch.randn_like(p)).requires_grad_() for n, p in model.named_parameters()})
    return sets


def run_versions(model: GPT, order: list[int]) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Forwards on the versions in this order, then the backwards in it, each on the version of its forward."""
    sets = versions(model)
    losses, totals = [], []
    for version in order:
        with Swapped(model, sets[version]), collecting() as said:
            loss = F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
        losses.append(loss.item())
        totals.append(loss + said.total_loss())
    for version, total in zip(order, totals):
        with Swapped(model, sets[version]):
            total.backward()
    return losses, [{name: leaf.grad for name, leaf in leaves.items()} for leaves in sets]  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["none", "block", "selective"])
def test_inductor(how: Any) -> None:
    config = copy.copy(CONFIGS["experts"])
    config.dropout = 0.0
    torch.manual_seed(0)
    plain = GPT(config)
    model = GPT(config, how, compile_blocks=True)
    model.load_state_dict(plain.state_dict())
    expected, found = trained(plain), trained(model)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param("experts", "none", marks=SLOW),
        ("experts", "selective"),
        pytest.param("dense", "none", marks=SLOW),
        pytest.param("dense", "block", marks=SLOW),
        pytest.param("dense", "selective", marks=SLOW),
        pytest.param("experts", "block", marks=SLOW),
    ],
)
def test_weight_versions_alternate_without_compiling_again(kind: str, how: Any) -> None:
    graphs = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    config = copy.copy(CONFIGS[kind])
    config.dropout = 0.0
    torch.compiler.reset()
    torch.manual_seed(0)
    model = GPT(config, how, compile_blocks={"backend": counting, "fullgraph": True})
    plain = GPT(config)
    plain.load_state_dict(model.state_dict())
    run_versions(model, [0])
    assert len(graphs) == {"dense": 1, "experts": 2}[kind]  # blocks of a kind share theirs
    losses, gradients = run_versions(model, [0, 1, 0, 2, 1])
    assert len(graphs) == {"dense": 1, "experts": 2}[kind]
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


def test_evaluation_keeps_nothing_to_recompute() -> None:
    model = built("dense", activation_checkpointing="block").eval()
    with torch.no_grad():
        assert torch.equal(model(TOKENS), built("dense").eval()(TOKENS))


def test_wrong_options_at_once() -> None:
    with pytest.raises(ValueError, match="activation_checkpointing='full': must be none, block or selective"):
        GPT(CONFIGS["dense"], activation_checkpointing="full")  # type: ignore[arg-type]

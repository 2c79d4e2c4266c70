"""A pipeline whose stages run the model's own forward trains as one process does, for many kinds of forwards."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp import ConfigurationError, apply_layers, pipelined
from lightning_asyncpp.core.cut.own_forward import OwnForwardStage
from lightning_asyncpp.core.cut.units import entering_units, pipeline_units
from lightning_asyncpp.core.tree import tensors_of
from tests.adapt import nets
from tests.adapt.home_made import HOME_MADE
from tests.adapt.nets import DIM, EXACT, ROUNDED, SHAPE, Net
from tests.helpers.models import assert_trains, of_transformers

LONG = (2, 7, DIM)


def seed(unit: int) -> None:
    torch.manual_seed(unit)


def stages_of(model: Any, ends: tuple[int, ...] = ()) -> list[OwnForwardStage]:
    """Return stages, split before the units with numbers ``ends``; by default, every unit is a stage."""
    own = model.pipeline_layers
    edges = [0, *(ends or range(1, own.num_units)), own.num_units]
    return [OwnForwardStage(model, own, first, end) for first, end in itertools.pairwise(edges)]


def in_stages(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the output of the last stage; when a unit begins, torch's generator is seeded with the unit's number."""
    for stage in stages_of(model):
        args, kwargs = (stage.run(args, kwargs, seed),), {}
    return args[0]


def as_a_whole(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the output of the model's own forward, with the same seeds."""
    with entering_units(model, seed):
        return model(*args, **kwargs)


def gradients(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    output.square().sum().backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def assert_same(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Compare outputs and gradients of stages with those of the model's own forward, on copies of the model."""
    whole, other = copy.deepcopy(model), copy.deepcopy(model)
    expected, found = as_a_whole(whole, *args, **kwargs), in_stages(other, *args, **kwargs)
    assert torch.equal(expected, found)
    theirs = gradients(whole, expected)
    for name, gradient in gradients(other, found).items():
        assert torch.allclose(gradient, theirs[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("kind", [*EXACT, *ROUNDED])
def test_trains_as_a_single_process_does(kind: type[Net]) -> None:
    torch.manual_seed(1)
    model = pipelined(kind(0.2), (torch.randn(SHAPE),))
    assert model.pipeline_layers.is_exact == (kind in EXACT)
    assert_trains(model, [{"x": torch.randn(SHAPE)} for _ in range(3)])


@pytest.mark.parametrize("name", HOME_MADE)
def test_models_of_ones_own_train_as_a_single_process_does(name: str) -> None:
    """Without an example, models are cut between the layers that their authors would name."""
    make, batch, expected = HOME_MADE[name]
    torch.manual_seed(0)
    model = pipelined(make())
    assert_trains(model, [{"x": batch()} for _ in range(3)], stages=2)
    units = pipeline_units(model)
    assert set(expected) <= {unit.name.split(" + ")[-1] for unit in units}, "a unit ends with its block"
    assert sorted(model.state_dict()) == sorted(make().state_dict())


@pytest.mark.parametrize("kind", [*EXACT, *ROUNDED])
def test_stages_give_what_forward_gives(kind: type[Net]) -> None:
    """Stages give the output of the model's own forward in both modes, also for longer sequences than the example's."""
    torch.manual_seed(0)
    model = pipelined(kind(0.2), (torch.randn(SHAPE),))
    for training, shape in itertools.product((True, False), (SHAPE, LONG)):
        assert_same(model.train(training), torch.randn(shape))


class Masking(Net):
    """Network that changes an argument in place and uses it again."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return super().forward(x) * x.mean()


def test_an_argument_that_is_changed_in_place() -> None:
    """Later stages get an argument as it was before the forward changed it in place."""
    x = torch.randn(SHAPE)
    model = pipelined(Masking(), (x,))
    assert torch.equal(in_stages(model, x.clone()), model(x.clone()))


def test_where_it_may_be_cut() -> None:
    units = [unit.name for unit in pipeline_units(pipelined(nets.Between(), (torch.randn(2, DIM),)))]
    assert units[:3] == ["entry + between.0 + blocks.0", "between.1 + blocks.1", "between.2 + blocks.2"]
    assert len(units) == 4
    assert units[3].startswith("out")
    costs = pipelined(Net(), (torch.randn(2, DIM),)).pipeline_costs()
    assert costs[0] == 2 * costs[1] - 1 > costs[1] == costs[2] > costs[3] > 1.0, "the entry is as dear as a block"


@pytest.mark.parametrize(
    ("kind", "most"), [(Net, 1), (nets.Added, 1), (nets.Frozen, 1), (nets.Skipping, 2), (nets.Ladder, 3)]
)
def test_nothing_travels_that_nobody_needs(kind: type[Net], most: int) -> None:
    """Stages send neither arguments whose values are not needed later, nor outputs of blocks that are not needed."""
    model, carried = pipelined(kind(), (torch.randn(SHAPE),)), torch.randn(5, 3, DIM)
    crossing = []
    for stage in stages_of(model)[:-1]:
        carried = stage.run((carried,), {})
        crossing.append(sum(tensor.numel() > 0 for tensor in tensors_of(carried)))
    assert max(crossing) <= most


@pytest.mark.parametrize("kind", [nets.Asking, nets.Normalised])
def test_dtypes_modes_and_copies(kind: type[Net]) -> None:
    """Stages follow changes of dtype and mode, such as those by a Trainer with ``precision="bf16-true"``."""
    x = torch.randn(SHAPE)
    model = pipelined(kind(), (x,))
    for changed in (model.double(), model.eval(), model.bfloat16().train(), model.float()):
        dtype = changed.entry.weight.dtype
        found, expected = in_stages(copy.deepcopy(changed), x.to(dtype)), copy.deepcopy(changed)(x.to(dtype))
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    sent = pickle.loads(pickle.dumps(model.eval()))
    assert torch.equal(in_stages(sent, x), model(x))
    assert torch.equal(apply_layers(model, x), model(x))


def test_pipelined_leaves_no_trace() -> None:
    torch.manual_seed(0)
    for kind in (nets.Normalised, nets.Initialised):
        fresh, model = kind(0.1), kind(0.1)
        model.load_state_dict(fresh.state_dict())
        state = torch.get_rng_state()
        pipelined(model, (torch.randn(SHAPE, generator=torch.Generator()),))
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), fresh.state_dict().values()))
        assert all(parameter.grad is None for parameter in model.parameters())
        assert vars(model).keys() - vars(fresh).keys() == {"pipeline_layers", "pipeline_costs"}
    assert (model.shift, model.calls) == (0.0, 0)


class Switched(Net):
    """Network whose forward depends on optional arguments, which may be passed by position or by name."""

    def forward(self, x: Tensor, twice: bool = False, more: Tensor | None = None, names: Any = ()) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x, scale=1.0 / (1 + len(names)))
        x = x if more is None else x + more
        return self.out(x * 2 if twice else x) + sum(map(len, names))


def test_arguments_may_come_or_not_by_position_or_by_name() -> None:
    """Arguments that the example lacks may be passed, in either way; booleans and strings may have any value."""
    x, more = torch.randn(SHAPE), torch.randn(SHAPE)
    model = pipelined(Switched(), (x,))
    for args, kwargs in (((x, True), {"names": ["a", "bcd"]}), ((), {"x": x, "twice": False}), ((x,), {"more": more})):
        assert_same(model, *args, **kwargs)
    assert_same(pipelined(Switched(), {"more": more, "x": x}), x=x, more=x)


def test_what_an_example_may_be() -> None:
    """An example may be a list, or a tensor, which is one argument and not one per row; see above for other kinds."""
    x = torch.randn(2, DIM)
    for example in (x, [x, True]):
        assert pipelined(Switched(), example).pipeline_layers.blocks == ("blocks.0", "blocks.1", "blocks.2")


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (torch.randn(2, DIM + 1), r"called with torch\.float32 \[2, 9\] \(RuntimeError: mat1 and mat2 shapes cannot"),
        ({"y": torch.ones(2, dtype=torch.int64)}, r"called with {'y': 'torch\.int64 \[2\]'} \(TypeError: "),
        (None, r"Switched cannot be called with guessed arguments .* Give an example"),
    ],
    ids=["another shape", "another name", "none is known"],
)
def test_an_example_that_does_not_fit(example: Any, message: str) -> None:
    model = Switched()
    model.entry = nn.Bilinear(DIM, DIM, DIM) if example is None else model.entry
    with pytest.raises(ConfigurationError, match=message):
        pipelined(model, example)
    assert not hasattr(model, "pipeline_layers")


class Deciding(Net):
    """Network whose output depends on the signs of a small argument, which has other values in the example."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:  # type: ignore[override]
        h = self.entry(x)
        for block in self.blocks:
            h = block(h)
        return self.out(torch.where((c > 0)[:, None], h * 2, h))


@pytest.mark.parametrize("dtype", [torch.float32, torch.long])
def test_values_that_decide_travel(dtype: torch.dtype) -> None:
    model = pipelined(Deciding(), (torch.randn(2, DIM), torch.tensor([-1, 1], dtype=dtype)))
    assert_same(model, torch.randn(4, DIM), torch.tensor([1, -1, 1, -1], dtype=dtype))


class Padded(nn.Module):
    """Model from whose inputs torch removes padding in evaluation mode, by the values of the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(7, DIM), nn.Linear(DIM, 2)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, 2, 8, batch_first=True), 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0))


def test_padding_in_an_evaluation_without_gradients() -> None:
    model = pipelined(Padded()).eval()
    tokens = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0], [6, 1, 2, 3]])
    with torch.no_grad():
        expected, found = model(tokens), in_stages(model, tokens)
    real = tokens != 0
    assert torch.allclose(found[real], expected[real], atol=1e-6)


def processor_time(function: Any, rounds: int = 11) -> float:
    """Return the median processor time of a call, in ms."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        times.append(1e3 * (time.process_time() - start))
    return sorted(times)[rounds // 2]


@pytest.mark.slow
def test_a_stage_costs_little_more_than_its_blocks() -> None:
    """In stages of a small Llama, blocks of other stages cost only the Python code around their calls."""
    blocks, each = 32, 4
    torch.manual_seed(0)
    model = pipelined(of_transformers("llama", num_hidden_layers=blocks)).train()
    tokens = torch.randint(3, 99, (2, 9))
    call = {"input_ids": tokens, "labels": tokens}
    costs, args, kwargs = [], (), call
    whole = processor_time(lambda: model(**call))
    for stage in stages_of(model, tuple(range(each, blocks, each))):
        costs.append(processor_time(lambda stage=stage, a=args, k=kwargs: stage.run(a, k)))
        args, kwargs = (stage.run(args, kwargs),), {}
    print(f"\nwhole {whole:.2f} ms; stages {', '.join(f'{cost:.2f}' for cost in costs)} ms of processor time")
    assert max(costs) < whole / 2

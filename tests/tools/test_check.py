"""check_model: what a pipeline trains right passes to the last bit, and what would break is named with the mend."""

from __future__ import annotations

import functools
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from lightning_asyncpp import GPTModule, check_model
from lightning_asyncpp.core.batches.micro_batch import split_batch
from lightning_asyncpp.core.schedule import Slack, Staleness
from lightning_asyncpp.core.wire.header import TensorInfo
from lightning_asyncpp.models import GPTConfig, MoEConfig
from lightning_asyncpp.optim import MuonAdamW
from lightning_asyncpp.tools.check import check
from tests.core.cases import DIM, make_model
from tests.trainer.modules import BatchNormNet, KeywordNet, NoisyNet, SummingNet, WeighingNet
from tests.trainer.runs import Net, Run

Layer = Callable[[nn.Linear, Any], Any]


def batches(*sizes: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(size, DIM, generator=generator), "y": torch.randn(size, 1, generator=generator)}
        for size in sizes or (8, 8, 8)
    ]


def step(model: nn.Module, micro_batch: Any) -> Tensor:
    return F.mse_loss(model(micro_batch["x"]), micro_batch["y"])


def linear() -> nn.Linear:
    return nn.Linear(DIM, DIM)


class Applied(nn.Module):
    """A linear layer, and what is done with it."""

    def __init__(self, function: Layer) -> None:
        super().__init__()
        self.linear = linear()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(self.linear, x)


def around_a_cut(before: Layer, after: Layer) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(Applied(before), Applied(after), nn.Linear(DIM, 1))


# -- what works ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_model_with_dropout(stages: int, delay: int) -> None:
    model = make_model(0.2)
    before = [p.clone() for p in model.parameters()]
    report = check_model(model, batches(), step, stages=stages, delay=delay, updates=5)
    assert report.bitwise, report.differences
    assert len(report.losses) == 5
    assert [name for names in report.stages for name in names] == [str(i) for i in range(9)]
    assert [len(tensors) for tensors in report.crossings] == [1] * (stages - 1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before)), "what was given was changed"


@pytest.mark.parametrize(
    ("staleness", "slack", "lookahead"),
    [
        ("least", 0, 0),
        pytest.param("least", 1, 2, marks=pytest.mark.slow),
        ("least", "exact", 0),
        ("least", 0, 3),
        pytest.param("least", 1, 0, marks=pytest.mark.slow),
        pytest.param("least", "exact", 2, marks=pytest.mark.slow),
    ],
)
def test_stages_whose_gradients_differ_in_age(staleness: Staleness, slack: Slack, lookahead: int) -> None:
    """They clip, count and share as the rule has it; without it the reference would be another training."""
    model = make_model(0.2, tied=True, routed=True)
    shape: dict[str, Any] = {"stages": 3, "micro_batches": 5, "lookahead": lookahead, "max_norm": 0.05}
    report = check_model(model, batches(10, 10, 7), step, updates=6, staleness=staleness, slack=slack, **shape)
    assert report.bitwise, report.differences
    uniform = check_model(model, batches(10, 10, 7), step, updates=6, staleness="uniform", **shape)
    assert uniform.bitwise
    assert report.losses != uniform.losses


@pytest.mark.parametrize("stages", [1, 3])
def test_shared_weights_and_losses_that_layers_add(stages: int) -> None:
    """Two stages hold the same matrix; layers of all stages add to the loss, count, and learn from the counts."""
    model = make_model(0.2, tied=True, routed=True)
    report = check_model(model, batches(), step, stages=stages, updates=5)
    assert report.bitwise, report.differences


ACROSS: dict[str, tuple[Layer, Layer]] = {
    "a dictionary": (lambda f, x: {"h": f(x), "mask": x > 0}, lambda f, c: f(c["h"]) * c["mask"]),
    "a tensor and None": (lambda f, x: (f(x), None), lambda f, c: f(c[0]) if c[1] is None else c[0]),
    "a list": (lambda f, x: [f(x), x], lambda f, c: f(c[0]) + c.pop()),
    "numbers": (
        lambda f, x: {"h": (f(x), [3, 0.1, True, "text"])}, lambda f, c: f(c["h"][0]) * c["h"][1][0] * c["h"][1][1]
    ),
    "a tensor twice": (lambda f, x: (lambda h: (h, h))(f(x)), lambda f, c: f(c[0]) * c[1]),
    "views": (lambda f, x: f(x).chunk(2, dim=-1), lambda f, c: f(torch.cat(c, dim=-1))),
    "transposed": (lambda f, x: f(x).t(), lambda f, c: f(c.t())),
    "expanded": (lambda f, x: (f(x), torch.ones(1).expand(len(x), DIM)), lambda f, c: f(c[0]) * c[1]),
    "one that is not used": (lambda f, x: (f(x), f(2 * x)), lambda f, c: f(c[0])),
    "positions": (lambda f, x: (f(x), torch.arange(len(x))), lambda f, c: f(c[0]) + c[1].unsqueeze(1)),
    "no gradient": (lambda f, x: f(x).detach(), lambda f, c: f(c)),
    "an empty tensor": (lambda f, x: (f(x), x[:0]), lambda f, c: f(c[0]) + c[1].sum()),
    "another dtype": (lambda f, x: f(x).double(), lambda f, c: f(c.float())),
    "changed in place": (lambda f, x: f(x), lambda f, c: f(c.add_(1))),
}  # fmt: skip


@pytest.mark.parametrize("name", ACROSS)
def test_what_crosses_a_cut(name: str) -> None:
    assert check_model(around_a_cut(*ACROSS[name]), batches(8, 5), step, stages=3).bitwise


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_images_keep_their_memory_format(memory_format: torch.memory_format) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 4, 3),
        nn.Flatten(), nn.Linear(36, 1),
    ).to(memory_format=memory_format)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(8, 3, 12, 12, generator=generator).to(memory_format=memory_format) for _ in range(3)]
    report = check_model(model, [{"x": x, "y": x.mean((1, 2, 3))[:, None]} for x in images], step, stages=3)
    assert report.bitwise, report.differences
    is_last = memory_format == torch.channels_last
    assert [tensors[0].order for tensors in report.crossings] == [(0, 2, 3, 1) if is_last else ()] * 2


Named = namedtuple("Named", ["x", "y"])


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor
    name: str = "batch"


@pytest.mark.parametrize("kind", [Named, Frozen, lambda **fields: UserDict(fields)], ids=["tuple", "dataclass", "user"])
def test_kinds_of_batches(kind: Any) -> None:
    def by_attribute(model: nn.Module, micro_batch: Any) -> Tensor:
        assert not isinstance(micro_batch, dict)
        fields = micro_batch if isinstance(micro_batch, UserDict) else vars_of(micro_batch)
        return step(model, fields)

    given = [kind(**batch) for batch in batches(8, 5)]
    assert check_model(make_model(), given, by_attribute, stages=3).bitwise


def vars_of(batch: Any) -> dict[str, Any]:
    return {"x": batch.x, "y": batch.y}


def test_batches_of_any_size_and_length() -> None:
    """Of 8, 5, 1 and 2 samples; sequences as long as the longest of their micro-batch."""
    model = nn.Sequential(linear(), nn.LSTM(DIM, DIM, batch_first=True), Applied(lambda f, x: f(x[0])))
    generator = torch.Generator().manual_seed(3)
    given = [
        {"x": torch.randn(n, length, DIM, generator=generator), "length": torch.arange(1, length + 1)[-n:]}
        for n, length in ((8, 9), (5, 6), (1, 3), (2, 7))
    ]

    class Trims(nn.Module):
        """As a module with a model does: cuts sequences to the longest of their micro-batch."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.lengths: list[int] = []

        def split_batch(self, batch: Any, parts: int) -> list[Any]:
            pieces = split_batch(batch, parts)
            return [piece and piece | {"x": piece["x"][:, : int(piece["length"].max())]} for piece in pieces]

        def training_step(self, micro_batch: Any, batch_idx: int) -> Tensor:
            return self.model(micro_batch["x"]).square().mean()

    assert check_model(Trims(), given, stages=2, micro_batches=4, updates=6).bitwise


@pytest.mark.parametrize("module", [Net, BatchNormNet, KeywordNet, NoisyNet, WeighingNet, SummingNet])
def test_lightning_modules(module: Any) -> None:
    """BatchNorm's running statistics are compared, too."""
    report = check_model(module(Run(module, dropout=0.1)), batches(), stages=2, updates=5)
    assert report.bitwise, report.differences


class WithoutIndex(Net):
    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return F.mse_loss(self.model(batch["x"]), batch["y"])


def test_a_training_step_that_takes_the_batch_alone() -> None:
    assert check_model(WithoutIndex(Run(WithoutIndex)), batches(), stages=2).bitwise


def test_a_module_that_is_built_on_the_meta_device() -> None:
    config = GPTConfig(vocab_size=32, context_length=8, num_layers=3, dim=16, num_heads=2, mlp_dim=32)
    tokens = [torch.randint(0, 32, (6, 9), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    report = check_model(GPTModule(config), tokens, stages=3, optimizer=functools.partial(MuonAdamW, lr=0.02))
    assert report.bitwise
    assert report.losses[-1] < report.losses[0]


def test_a_module_whose_routers_learn() -> None:
    """On every stage, and in the single process that it is compared with."""
    moe = MoEConfig(num_experts=4, expert_dim=8, router="sigmoid", balance_bias_rate=0.01)
    module = GPTModule(GPTConfig(32, 16, num_layers=3, dim=16, num_heads=2, mlp_dim=16, moe=moe))
    tokens = [torch.randint(0, 32, (4, 17), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    assert check_model(module, tokens, stages=2).bitwise


def test_a_layer_called_log() -> None:
    class Logs(nn.Sequential):
        def __init__(self) -> None:
            super().__init__()
            self.log = linear()
            self.head = nn.Linear(DIM, 1)

    assert check_model(Logs(), batches(), step).bitwise


def test_buffers_that_a_forward_reads_and_changes() -> None:
    """Forwards run in order on every stage; the backward goes through what the forward had."""

    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear()
            self.register_buffer("mean", torch.zeros(DIM))

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x * (1 + self.mean)

    model = nn.Sequential(Moving(), spectral_norm(linear()), Moving(), nn.Linear(DIM, 1))
    assert check_model(model, batches(), step, stages=3, updates=6).bitwise


def test_the_report() -> None:
    model = around_a_cut(*ACROSS["a dictionary"])
    report = check_model(model, batches(8), step, updates=2, partition=[2, 1])
    text = str(report)
    assert report.stages == [["0", "1"], ["2"]]
    assert report.crossings == [(TensorInfo((4, DIM), torch.float32, True),)]
    assert "stage 0: 0, 1\n  | (4, 6) float32: 96 bytes forward per micro-batch\nstage 1: 2\nlayers: applied" in text
    assert ", with 2 micro-batches of 1 batch\n2 updates, loss" in text
    assert "all weights and buffers equal those of a single process to the last bit" in text
    (crossing,) = check_model(model, batches(9), step, stages=3, updates=1).crossings[:1]
    assert crossing == (TensorInfo((3, DIM), torch.float32, True), TensorInfo((3, DIM), torch.bool, False))


# -- the command --------------------------------------------------------------------------------------------------


def arguments(folder: Path, *more: str) -> list[str]:
    (folder / "text").mkdir(exist_ok=True)
    for index in range(20):
        (folder / "text" / f"{index}.txt").write_text(f"document {index} of some words, not many\n" * 20)
    return [
        "--config", str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml"),
        "--data.init_args.source", str(folder / "text"), "--data.init_args.cache_dir", str(folder / "cache"),
        "--data.init_args.val_fraction", "0.2", "--data.init_args.batch_size", "6",
        "--data.init_args.context_length", "16", "--model.init_args.config.context_length", "16",
        "--model.init_args.config.dim", "32", *more,
    ]  # fmt: skip


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number of stages of the recipe, and another one; more stages than layers end it with code 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["asyncpp"])
    check.main(arguments(tmp_path, "--updates", "2"))
    assert "stage 1: blocks.2, blocks.3, head\nlayers: applied" in (printed := capsys.readouterr().out)
    assert "\n2 updates, loss 5.5" in printed
    assert "equal those of a single process to the last bit" in printed
    check.main(arguments(tmp_path, "--updates", "1", "--stages", "3"))
    assert "stage 2: " in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        check.main(arguments(tmp_path, "--stages", "9", "--updates", "1"))
    assert ended.value.code == 1
    assert "asyncpp check: the model has 6 layers with parameters, fewer than the 9 stages" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        check.main(arguments(tmp_path, "--stages", "0", "--micro_batches", "0", "--updates", "0"))
    assert "stages=0 must be a whole number" in (printed := capsys.readouterr().err)
    assert "updates=0 must be a whole number" in printed
    assert not (tmp_path / "runs").exists(), "a check leaves no logs"


def test_the_command_checks_the_recipes_staleness_and_lookahead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["asyncpp"])
    monkeypatch.setattr(check, "check_model", lambda *_, **shape: given.update(shape) or SimpleNamespace(ok=True))
    strategy = "--trainer.strategy.init_args."
    chosen = [f"{strategy}staleness=least", f"{strategy}slack=exact", f"{strategy}lookahead=1"]
    check.main(arguments(tmp_path, *chosen, "--updates", "1"))
    assert [given[name] for name in ("staleness", "slack", "lookahead", "delay")] == ["least", "exact", 1, 1]


@pytest.mark.parametrize(("found", "code"), [({"findings": ["loss"]}, 1), ({"findings": []}, 3)])
def test_how_the_command_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], code: int
) -> None:
    """A comparison that was left out is told from what is to be mended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["asyncpp"])
    monkeypatch.setattr(check, "check_model", lambda *_, **shape: SimpleNamespace(ok=False, **found))
    with pytest.raises(SystemExit) as ended:
        check.main(arguments(tmp_path, "--updates", "1"))
    assert ended.value.code == code


def test_batches_of_several_loaders_at_once() -> None:
    """As the Trainer reads them, the shorter one again and again."""
    data = SimpleNamespace(
        prepare_data=lambda: None, setup=lambda stage: None, train_dataloader=lambda: {"a": [1, 2, 3], "b": [4, 5]}
    )
    taken = check._batches(SimpleNamespace(datamodule=data), 5)  # type: ignore[arg-type]
    assert taken == [{"a": 1, "b": 4}, {"a": 2, "b": 5}, {"a": 3, "b": 4}]

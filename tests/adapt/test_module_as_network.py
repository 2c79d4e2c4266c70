"""A LightningModule that is the network itself: layers in its attributes, and steps that call ``self(...)``."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_asyncpp import DelayedGradientStrategy, check_model, pipelined
from lightning_asyncpp.core.cut.network import class_name, name_in_steps, network_in
from lightning_asyncpp.trainer import AsyncPipelineStrategy
from tests.helpers.models import assert_trains
from tests.helpers.oracle import assert_equal_weights, joined_parts
from tests.helpers.pool import Pools, impatient
from tests.helpers.trainer import arrays

DIM, CLASSES, STEPS = 6, 3, 6
MICROBATCHES = {"microbatches": 4}


class Classifier(L.LightningModule):
    """As in Lightning's first examples, with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.dropout = nn.Linear(DIM, DIM), nn.Dropout(0.2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3))
        self.last, self.scale = nn.Linear(DIM, CLASSES), nn.Parameter(torch.ones(CLASSES))
        self.register_buffer("shift", torch.ones(CLASSES))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.first(x).relu())
        for block in self.blocks:
            x = x + block(x)
        return (self.last(x) * self.scale + self.shift) * self.factor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(batches(), batch_size=None)

    val_dataloader = train_dataloader


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS, 8, DIM, generator=generator)
    return list(zip(x, x[:, :, :CLASSES].argmax(-1)))


def fit(
    stages: int,
    kind: type[L.LightningModule] = Classifier,
    saved: str = "",
    resumed: str | None = None,
    epochs: int = 1,
    callbacks: Any = None,
) -> tuple[dict[str, Any], float]:
    """Weights, of this stage in a pipeline, and the last validation loss."""
    L.seed_everything(1, verbose=False)
    module = kind()
    strategy: Any = AsyncPipelineStrategy(**MICROBATCHES)
    if not stages:
        strategy = DelayedGradientStrategy(stages=2, **MICROBATCHES)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=stages or 1, max_epochs=epochs, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=resumed)
    if saved:
        trainer.save_checkpoint(saved)
    found = dict(strategy.session.stage.parameters if stages else module.named_parameters())
    return arrays(found), float(trainer.callback_metrics["val_loss"])


def test_a_pipeline_trains_it_as_one_process_does(pools: Pools) -> None:
    expected, loss = fit(0)
    results = pools.run(2, fit, 2)
    assert_equal_weights(joined_parts([weights for weights, _ in results]), expected)
    assert results[0][1] == pytest.approx(loss, rel=1e-6)


def test_checkpoints_have_its_own_names(pools: Pools, tmp_path: Path) -> None:
    whole = pools.run(3, fit, 3, Classifier, str(tmp_path / "whole.ckpt"), None, 2)
    pools.run(3, fit, 3, Classifier, str(tmp_path / "half.ckpt"))
    resumed = pools.run(3, fit, 3, Classifier, "", str(tmp_path / "half.ckpt"), 2)
    assert_equal_weights(*(joined_parts([weights for weights, _ in results]) for results in (resumed, whole)))
    module = Classifier()
    module.load_state_dict(torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"])
    assert_equal_weights(arrays(dict(module.named_parameters())), joined_parts([weights for weights, _ in whole]))


class Plain(Classifier):
    """Without anything of its own: once it is cut, a single attribute may be what is on another stage."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks, self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def test_once_cut_it_is_the_network_still(pools: Pools, tmp_path: Path) -> None:
    whole = pools.run(2, fit, 2, Plain, str(tmp_path / "whole.ckpt"), None, 2)
    pools.run(2, fit, 2, Plain, str(tmp_path / "half.ckpt"))
    resumed = pools.run(2, fit, 2, Plain, "", str(tmp_path / "half.ckpt"), 2)
    assert_equal_weights(*(joined_parts([weights for weights, _ in results]) for results in (resumed, whole)))


def averaged(stages: int) -> tuple[dict[str, Any], float]:
    """With averaged weights in the end; all of them are trained."""
    average = WeightAveraging(avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.5))
    return fit(stages, Plain, callbacks=average)


def test_averages_are_cut_as_it_is(pools: Pools) -> None:
    expected, loss = averaged(0)
    results = pools.run(2, averaged, 2)
    assert_equal_weights(joined_parts([weights for weights, _ in results]), expected)
    assert results[0][1] == pytest.approx(loss, rel=1e-6)


class Twice(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]) + self(-batch[0]), batch[1])


def test_a_step_that_calls_it_twice_is_refused(pools: Pools) -> None:
    outcomes = pools.outcomes(3, impatient, fit, 3, Twice)
    assert all(outcome.error for outcome in outcomes)
    assert any("after calling twice self(...)" in outcome.message for outcome in outcomes), outcomes


class Keeping(Classifier):
    """Its step reads what forward kept, on another stage."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.hidden.square().mean()


def test_a_step_that_reads_what_forward_kept_is_found_by_the_check() -> None:
    """In a training its loss is another one: on the last stage the attribute has no value of the first."""
    report = check_model(Keeping(), batches()[:2], stages=3)
    difference = report.differences[0]
    assert (difference.comparison, difference.kind) == ("pieces", "loss"), str(report)


class Counting(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class OfItsOwn(Classifier):
    """Says itself where to cut it."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.scale = 1.0

    def pipeline_layers(self) -> list[Any]:
        return [
            (self.first, lambda first, x: self.dropout(first(x).relu())),
            *((block, lambda block, x: x + block(x)) for block in self.blocks),
            (self.last, lambda last, x: (last(x) * self.scale + self.shift) * self.factor),
        ]


def test_it_may_say_where_to_cut_it() -> None:
    report = check_model(OfItsOwn(), batches()[:2], stages=3)
    assert report.ok, str(report)
    assert [name for stage in report.stages for name in stage][:2] == ["first", "blocks.0"]


class Eval(Plain):
    """Reads modes of layers that were set before the training."""

    def __init__(self) -> None:
        super().__init__()
        self.first.eval()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.first.training else 1.0)


def test_modes_of_layers_on_other_stages(pools: Pools) -> None:
    weights = [weights for weights, _ in pools.run(2, fit, 2, Eval)]
    assert_equal_weights(joined_parts(weights), fit(0, Eval)[0])


class Initialised(Classifier):
    """Sets itself up by its first batch."""

    def forward(self, x: Tensor, is_first: bool = False) -> Tensor:
        if self.factor == 1.0:
            self.factor = float(x.mean())
        return super().forward(x)


def test_the_example_sets_nothing_up() -> None:
    module = Initialised()
    network = pipelined(network_in(module), torch.randn(2, DIM))  # type: ignore[type-var]
    assert module.factor == 1.0
    assert network.pipeline_layers.blocks == ("blocks.0", "blocks.1", "blocks.2")


class Derived(Classifier):
    """A value that is computed from a parameter of its own goes to the end."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale * 2
        x = self.first(x * scale.mean())
        for block in self.blocks:
            x = block(x)
        return self.last(x) * scale


class Sharing(Classifier):
    """Its steps share one, which a class further up may have."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.share(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.share(batch)

    def share(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize("kind", [Derived, Counting, Sharing, type("SharingToo", (Sharing,), {})])
def test_trains_as_a_single_process_does(kind: Any) -> None:
    report = check_model(kind(), batches()[:2], stages=3)
    assert_trains(report, is_exact=kind is not Derived)


class Parts(Classifier):
    """Its step calls parts, and not the whole."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.last(self.first(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def test_a_step_that_calls_parts_is_told_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"self\.first, .*: call them in its forward\(\), and self\(\.\.\.\) once"):
        check_model(Parts(), batches(), stages=2)


def test_check_model() -> None:
    report = check_model(Classifier(), batches(), stages=3)
    assert report.ok, str(report)


def test_a_copy_is_a_network_of_its_own() -> None:
    module = Classifier()
    network = network_in(module)
    other = copy.deepcopy(module)
    assert network is network_in(module)
    assert network is not network_in(other)
    assert list(network.state_dict()) == list(module.state_dict())
    other.last = nn.Linear(DIM, CLASSES)
    assert network_in(other).last is other.last
    assert network.last is module.last
    module.eval()
    assert not network.training
    assert name_in_steps(module) == "self"
    assert "_pipeline_network" not in module.state_dict()
    sent = pickle.loads(pickle.dumps(module))
    assert list(network_in(sent).state_dict()) == list(module.state_dict())
    assert network_in(sent).of is sent
    assert class_name(network) == "Classifier"

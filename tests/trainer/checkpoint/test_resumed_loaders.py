"""Loaders with workers, several streams and several loaders: resumed exactly."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.pool import Pools
from tests.helpers.resumable import EPOCHS, TWO_EPOCHS, Showing, check_resumed, fit_showing, run_of


class Paired(Showing):
    """Fed by two loaders, of which the second ends before the first; what it was fed of both is noted."""

    def training_step(self, batch: list[dict[str, Tensor] | None], batch_idx: int) -> Tensor:
        first, second = batch
        assert first is not None
        self.numbers.append([first["number"].tolist(), None if second is None else second["number"].tolist()])
        loss = F.mse_loss(self.model(first["x"]), first["y"])
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(first["x"]))
        return loss


@pytest.mark.parametrize(
    "kind",
    [
        "stateful noisy workers",
        pytest.param("stateful noisy workers own sampler", marks=pytest.mark.slow),
        pytest.param("stateful generator", marks=pytest.mark.slow),
    ],
)
def test_what_workers_draw_in_the_next_epoch(kind: str, pools: Pools, tmp_path: Path) -> None:
    check_resumed(pools, run_of(tmp_path, kind, TWO_EPOCHS), kind, tmp_path, [5])


@pytest.mark.parametrize(
    ("kind", "steps"),
    [pytest.param("litdata combined", [1, 7, 8], marks=pytest.mark.slow), ("litdata combined all", [3, 9])],
)
def test_several_streams(kind: str, steps: list[int], pools: Pools, tmp_path: Path) -> None:
    """All stages read all of them, and a run goes on in any epoch."""
    run = run_of(tmp_path, kind, EPOCHS, samples=30)
    whole = check_resumed(pools, run, kind, tmp_path, steps)
    read = {number for batch in whole[0]["numbers"] for number in batch}
    assert read == set(range(run.samples))


def test_the_shorter_of_two_loaders_has_ended(pools: Pools, tmp_path: Path) -> None:
    run = run_of(tmp_path, "two stateful", EPOCHS, samples=32)
    check_resumed(pools, run, "two stateful", tmp_path, [1, 3], fit=partial(fit_showing, make=Paired))


@pytest.mark.slow
def test_loaders_that_are_made_anew(pools: Pools, tmp_path: Path) -> None:
    """A checkpoint says where the newest is."""
    run = run_of(tmp_path, "stateful", EPOCHS | {"reload_dataloaders_every_n_epochs": 1})
    check_resumed(pools, run, "stateful", tmp_path, [3, 5, 7])

"""Weights that two stages share: found before the cut, initialised alike, kept once, refused where they would drift."""

from __future__ import annotations

import queue
import socket
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_asyncpp.core.cut.cutting import cut
from lightning_asyncpp.core.cut.ties import (
    Tie,
    check_copies,
    find_ties,
    keep_once,
)
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.core.engine import Engine
from lightning_asyncpp.core.microbatch import UserHooks
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.core.updates.reduction import TiedGradients
from lightning_asyncpp.core.wire.connect import Neighbours
from lightning_asyncpp.core.wire.link import Link
from lightning_asyncpp.core.wire.transport import Transport
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.models import GPT, GPTConfig
from tests.helpers.cases import DIM, Case
from tests.helpers.engine import run_oracle

CPU = torch.device("cpu")
TIE = Tie((0, 2), ("first", "second"))


def gpt() -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(vocab_size=7, context_length=4, num_layers=2, dim=8, num_heads=2, tie_embeddings=True))


def test_ties_are_found_between_stages_only() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    units = pipeline_units(model)
    assert find_ties(units, [3]) == []
    assert find_ties(units, [2, 1]) == [Tie((0, 1), ("0.weight", "2.weight"))]
    assert find_ties(units, [1, 1, 1]) == [Tie((0, 2), ("0.weight", "2.weight"))]
    model[0].weight.requires_grad_(False)
    assert find_ties(units, [2, 1]) == [Tie((0, 1), ("0.weight", "2.weight"))]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_both_copies_begin_as_the_whole_models_matrix(num_stages: int) -> None:
    (whole,) = stages_of(gpt, 1)
    expected = whole.model.state_dict()
    for stage in stages_of(gpt, num_stages):
        assert all(torch.equal(value, expected[name]) for name, value in stage.state_dict().items())
    assert torch.equal(expected["head.weight"], expected["embedding.token.weight"])


def stages_of(build: Any, num_stages: int) -> list[Any]:
    return [cut(build(), index, num_stages, seed=3, device=CPU) for index in range(num_stages)]


def test_a_checkpoint_holds_them_once() -> None:
    state = keep_once(
        {"m.first": torch.ones(2), "m.second": torch.ones(2), "m.other": torch.ones(2)}, [("m.first", "m.second")]
    )
    assert state["m.first"] is state["m.second"]
    assert state["m.other"] is not state["m.first"]
    assert keep_once({"other": torch.ones(1)}, [TIE.names]) == {"other": torch.ones(1)}


def test_weights_of_a_model_that_does_not_share_are_refused() -> None:
    check_copies({"first": torch.ones(2)}, [TIE.names])
    check_copies({"first": torch.ones(2), "second": torch.ones(2)}, [TIE.names])
    with pytest.raises(ConfigurationError, match="differ in the checkpoint"):
        check_copies({"first": torch.ones(2), "second": torch.zeros(2)}, [TIE.names])


def three_shared(trained: bool = True) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    model[2].weight = model[3].weight = model[0].weight
    model[0].weight.requires_grad_(trained)
    return model


@pytest.mark.parametrize("trained", [True, False])
def test_more_than_two_stages_may_share(trained: bool) -> None:
    units = pipeline_units(three_shared(trained))
    assert find_ties(units, [2, 2]) == [Tie((0, 1), ("0.weight", "2.weight"))]
    (tie,) = find_ties(units, [1, 2, 1])
    assert tie == Tie((0, 1, 2), ("0.weight", "2.weight", "3.weight"))
    assert [tie.before(stage) for stage in tie.stages] == [None, 0, 1]
    assert [tie.behind(stage) for stage in tie.stages] == [1, 2, None]


class QueueMesh(Mesh):
    """The place of a stage that is a thread: host data goes through queues."""

    def __init__(self, boxes: defaultdict[tuple[int, int, int], queue.Queue], stage: int) -> None:
        super().__init__(3, 1, 2 - stage)
        self._boxes = boxes

    def send(self, copy: Any, rank: int, tag: int) -> Any:
        self._boxes[self.rank, rank, tag].put(copy.wait().clone())
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        box = self._boxes[rank, self.rank, tag]
        return SimpleNamespace(wait=lambda: tensor.copy_(box.get(timeout=5)), is_completed=lambda: False)


def in_threads(work: Callable[[Mesh, Neighbours], dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Run three stages, each in a thread, connected by sockets."""
    boxes: defaultdict[tuple[int, int, int], queue.Queue] = defaultdict(queue.Queue)
    (a, b), (c, d) = socket.socketpair(), socket.socketpair()
    first, middle, last = QueueMesh(boxes, 0), QueueMesh(boxes, 1), QueueMesh(boxes, 2)
    neighbours = [
        Neighbours(None, Link(a, "stage 1")),
        Neighbours(Link(b, "stage 0"), Link(c, "stage 2")),
        Neighbours(Link(d, "stage 1"), None),
    ]
    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(work, (first, middle, last), neighbours))


def middle_shares(first_too: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)), nn.Linear(DIM, 1))
    model[3].weight = model[1].weight
    if first_too:
        model[0].weight = model[1].weight
    return model


@pytest.mark.parametrize(("unfrozen", "first_too"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_stage_in_the_middle_waits_for_what_it_shares(
    monkeypatch: pytest.MonkeyPatch, unfrozen: bool, first_too: bool
) -> None:
    """Who puts off its control message while the stage before waits for it waits for activations that never come.

    What is unfrozen after the cut is shared, too.
    """
    monkeypatch.setattr("lightning_asyncpp.core.wire.link._DEFAULT_TIMEOUT", 5.0)  # of a deadlock
    monkeypatch.setattr(TiedGradients, "have_arrived", lambda self: False)  # a large matrix over a slow network
    case = Case(3, model=lambda _: middle_shares(first_too), batch_sizes=(6,) * 4)

    models = [middle_shares(first_too) for _ in range(3)]  # threads would draw from one generator

    def train(mesh: Mesh, neighbours: Neighbours) -> dict[str, torch.Tensor]:
        model = models[mesh.stage]
        model[1].weight.requires_grad_(not unfrozen)
        stage = cut(model, mesh.stage, 3, case.seed, CPU, counts=(1, 2, 2))
        for parameter in stage.parameters.values():
            parameter.requires_grad_(True)
        transport = Transport(mesh, CPU, 2**20, neighbours=neighbours)
        settings = PipelineSettings(microbatches=3).resolved(3)
        engine = Engine(stage, mesh, settings, case.seed, CPU, UserHooks(), transport=transport)
        optimizer = case.make_optimizer(list(stage.parameters.values()))
        engine.updates.apply = lambda _: optimizer.step() and None
        for i in range(4):
            engine.run(case.batch(i), case.step(stage.model))
            engine.complete()
            engine.apply_due()
        engine.drain()
        return {name: p.detach() for name, p in stage.parameters.items()}

    trained = {name: p for stage in in_threads(train) for name, p in stage.items()}
    expected, _ = run_oracle(case)
    first = "0.weight" if first_too else "1.weight"
    copies = [trained.pop(name) for name in ("1.weight", "3.weight") if name != first]
    assert all(torch.equal(copy, trained[first]) for copy in copies)
    assert trained.keys() == expected.keys()
    assert all(torch.equal(trained[name], expected[name]) for name in expected)

"""Models of other libraries are cut in one line, and train in a pipeline as in one process."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from lightning_asyncpp import apply_layers, pipelined
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.core.tree import tensors_of
from tests.helpers.models import MODELS, QUICK, assert_trains, batches_for, example_of

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MODELS])
def test_trains_as_a_single_process_does(name: str) -> None:
    """Stages train to the weights of one process, with dropout where the model has any.

    The layers of the model, of a copy and of a pickled copy give the model's output, also for longer sequences.
    """
    torch.manual_seed(0)
    model = MODELS[name]()
    names = list(model.state_dict())
    model = pipelined(model, example_of(name))
    assert list(model.state_dict()) == names
    units = pipeline_units(model)
    assert {id(p) for p in model.parameters()} <= {id(p) for unit in units for p in unit.module.parameters()}
    batches = batches_for(name, model)
    assert_trains(model.train(), batches)

    batch = batches[0]
    if "x" not in batch and "input_ids" in batch:
        batch = {key: torch.cat([v, v], 1) if v.ndim > 1 else v for key, v in batch.items()}
    args, kwargs = ((batch["x"],), {}) if "x" in batch else ((), {**batch, "use_cache": False})
    if not hasattr(getattr(model, "config", None), "use_cache"):
        kwargs.pop("use_cache", None)
    copies = [model.eval(), copy.deepcopy(model)]
    if name != "lora":  # its forward is a closure, which cannot be pickled
        copies.append(pickle.loads(pickle.dumps(model)))
    with torch.no_grad():
        expected = list(tensors_of(model(*args, **kwargs)))
        for each in copies:
            found: list[Tensor] = list(tensors_of(apply_layers(each, *args, **kwargs)))
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected))

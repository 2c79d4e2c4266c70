"""Models of other libraries are cut in one line, and train in a pipeline as their own forwards say."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from lightning_asyncpp import apply_layers, check_model, pipelined
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.core.tree import tensors_of
from tests.helpers.models import MODELS, SLOW, Trained, assert_trains, batches_for, example_of

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = ("gpt2", "mixtral", "t5", "timm_vit")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MODELS])
def test_trains_as_a_single_process_does(name: str) -> None:
    """Asynchronously on three stages, with dropout where it has any, and on one."""
    torch.manual_seed(0)
    model = MODELS[name]()
    names = list(model.state_dict())
    module = Trained(pipelined(model, example_of(name)))
    assert list(model.state_dict()) == names
    for stages in (3, 1):
        report = check_model(module, batches_for(name, model), stages=stages, microbatches=4, updates=3)
        assert_trains(report, model.pipeline_layers.is_exact or stages == 1)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in MODELS])
def test_layers_give_what_forward_gives(name: str) -> None:
    """With other shapes than those of the example; a copy, and one that was pickled, too."""
    torch.manual_seed(0)
    model = pipelined(MODELS[name](), example_of(name)).eval()
    units = pipeline_units(model)
    assert {id(p) for p in model.parameters()} <= {id(p) for unit in units for p in unit.module.parameters()}
    batch = batches_for(name, model)[0]
    if "x" not in batch and "input_ids" in batch:
        batch = {key: torch.cat([v, v], 1) if v.ndim > 1 else v for key, v in batch.items()}
    args, kwargs = ((batch["x"],), {}) if "x" in batch else ((), {**batch, "use_cache": False})
    if not hasattr(getattr(model, "config", None), "use_cache"):
        kwargs.pop("use_cache", None)
    copies = [model, copy.deepcopy(model)]
    if name not in ("lora", "wav2vec2"):  # a forward that is a closure, and a parametrization: never pickled
        copies.append(pickle.loads(pickle.dumps(model)))
    with torch.no_grad():
        expected = list(tensors_of(model(*args, **kwargs)))
        for each in copies:
            found: list[Tensor] = list(tensors_of(apply_layers(each, *args, **kwargs)))
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected))

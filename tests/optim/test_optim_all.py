"""Every optimizer of the package works with pipeline stages, schedulers, checkpoints and Error Feedback."""

from __future__ import annotations

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn

from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.optim import SOAP, ErrorFeedback, MuonAdamW, NorMuonAdamW

VOCABULARY, CONTEXT = 40, 12
MAKE = {
    "AdamW": partial(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "MuonAdamW": partial(MuonAdamW, lr=3e-3, newton_schulz_dtype="float32"),
    "NorMuonAdamW": partial(NorMuonAdamW, lr=3e-3, newton_schulz_dtype="float32"),
    # Only the side of the vocabulary is too long to be rotated, and the bases are refreshed within a few steps.
    "SOAP": partial(SOAP, lr=3e-3, precondition_frequency=2, max_precondition_dim=39),
}
every = pytest.mark.parametrize("name", MAKE)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(
        GPTConfig(vocab_size=VOCABULARY, context_length=CONTEXT, num_layers=3, dim=16, num_heads=2, num_kv_heads=1)
    )


def cut(model: GPT, *stages: str) -> list[nn.ModuleDict]:
    """Cut the model into stages of the named units."""
    units = dict(zip(("embedding", "block0", "block1", "block2", "head"), model.pipeline_layers()))
    return [nn.ModuleDict({unit: units[unit] for unit in stage.split()}) for stage in stages]


def set_gradients(parameters, step: int, skip: int | None = None) -> None:
    for i, p in enumerate(parameters):
        grad = 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + i))
        p.grad = None if skip is not None and i % skip == 0 else grad.to(p.dtype)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def same(left, right) -> bool:
    return all(torch.equal(p, q) for p, q in zip(left, right, strict=True))


@every
@pytest.mark.parametrize(
    "stages",
    # In the second cut, two stages have no hidden matrix, and two have no embedding.
    [("embedding block0", "block1", "block2 head"), ("embedding", "block0 block1 block2", "head")],
)
@pytest.mark.parametrize("feedback", [False, True])
def test_a_cut_model_takes_the_steps_of_the_whole_one_bitwise(name, stages, feedback):
    make = partial(ErrorFeedback, base=MAKE[name]) if feedback else MAKE[name]
    whole, parts = gpt(), gpt()
    optimizers = [make(whole.named_parameters()), *(make(stage.named_parameters()) for stage in cut(parts, *stages))]
    schedulers = [schedule(optimizer) for optimizer in optimizers]
    for step in range(4):
        for model in (whole, parts):
            set_gradients(model.parameters(), step, skip=5 if step == 2 else None)
        for optimizer, scheduler in zip(optimizers, schedulers):
            optimizer.step()
            scheduler.step()
    assert same(whole.parameters(), parts.parameters())
    assert not same(whole.parameters(), gpt().parameters())


@every
@pytest.mark.parametrize(
    ("feedback", "dtype"),
    [(None, torch.float32), ({}, torch.float32), ({"buffer_dtype": "bfloat16"}, torch.float32), (None, torch.bfloat16)],
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(name, feedback, dtype):
    make = MAKE[name] if feedback is None else partial(ErrorFeedback, base=MAKE[name], **feedback)
    model = gpt().to(dtype)
    optimizer = make(model.named_parameters())
    for step in range(3):
        set_gradients(model.parameters(), step, skip=4 if step == 0 else None)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    resumed = copy.deepcopy(model)
    fresh = make(resumed.named_parameters())
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for state in fresh.state.values():  # SOAP's step was a tensor in older versions
        state.update({"step": torch.as_tensor(state["step"])} if "step" in state else {})
    for step in range(3, 6):
        for m, o in ((model, optimizer), (resumed, fresh)):
            set_gradients(m.parameters(), step)
            o.step()
    assert same(model.parameters(), resumed.parameters())


@every
def test_parameters_without_a_gradient_stay_and_cost_nothing(name):
    model = gpt()
    optimizer = MAKE[name](model.named_parameters())
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(2):
        set_gradients(model.parameters(), step, skip=2)
        optimizer.step()
    for i, (p, b) in enumerate(zip(model.parameters(), before)):
        assert torch.equal(p, b) == (i % 2 == 0)
        assert (p in optimizer.state) == (i % 2 == 1)


@pytest.mark.parametrize("name", [name for name in MAKE if name != "AdamW"])
def test_experts_are_matrices_one_by_one(name, monkeypatch):
    """Experts step like separate matrices; they are square, so that a first gradient determines SOAP's bases fully."""
    monkeypatch.setattr("lightning_asyncpp.optim.muon.BATCH_ELEMENTS", 3 * 25)  # splits the weight after 3 matrices
    exact = {} if name == "SOAP" else {"newton_schulz_dtype": "float64"}
    start, *gradients = torch.randn(9, 4, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    experts, alone = nn.Parameter(start.clone()), [nn.Parameter(one.clone()) for one in start]
    optimizers = [MAKE[name]([("up", experts)], **exact), *(MAKE[name]([("up", p)], **exact) for p in alone)]
    for gradient in gradients:
        for p, own in zip((experts, *alone), (gradient, *gradient)):
            p.grad = own.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(experts.detach(), torch.stack([p.detach() for p in alone]), rtol=0, atol=1e-9)

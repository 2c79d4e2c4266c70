"""Names decide which parameters go to Muon and which to AdamW, even if given late, and leave groups as they are."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW

MUON = [
    ("layers.0.attention.q_proj.weight", (8, 8)),
    ("3.mlp.down.weight", (8, 32)),
    ("layers.0.moe.experts.up", (4, 8, 16)),
    ("layers.0.moe.router.weight", (4, 8)),
    ("bert.layer.0.output.dense.weight", (8, 32)),
    ("decoder.block.0.layer.0.SelfAttention.q.weight", (8, 8)),
]
ADAMW = [
    ("model.tok_embeddings.weight", (100, 8)),
    ("transformer.wte.weight", (100, 8)),
    ("transformer.wpe.weight", (16, 8)),
    ("lm_head.weight", (100, 8)),
    ("output.weight", (100, 8)),
    ("score.weight", (3, 8)),
    ("cls.predictions.decoder.weight", (100, 8)),
    ("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (32, 4)),
    ("expert_embedding", (4, 8, 16)),
    ("layers.0.moe.experts.up_bias", (4, 16)),
    ("layers.0.attention.q_norm.weight", (4, 16)),
    ("layers.0.norm.weight", (8,)),
    ("gate.weight", (1, 8)),
    ("conv.weight", (8, 3, 3, 3)),
    ("encoder.conv1.weight", (8, 6, 3)),
]


def step(optimizer, params, seed=0):
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * seed + i))
    optimizer.step()


def is_muons(optimizer, p):
    return "momentum_buffer" in optimizer.state[p]


@pytest.mark.parametrize(
    ("name", "shape", "expected"), [*((*case, True) for case in MUON), *((*case, False) for case in ADAMW)]
)
def test_rule(name, shape, expected):
    p = nn.Parameter(torch.ones(shape))
    optimizer = MuonAdamW([(name, p)], newton_schulz_dtype="float32")
    step(optimizer, [p])
    assert is_muons(optimizer, p) == expected
    assert ("exp_avg" in optimizer.state[p]) != expected


def model():
    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Embedding(5, 4), "up": nn.Linear(4, 6), "down": nn.Linear(6, 4)})


def groups(module, named):
    """Return a group of weights, and a group of biases with its own learning rate and weight decay."""
    found = ([], [])
    for name, p in module.named_parameters():
        found["bias" in name].append((name, p) if named else p)
    return [{"params": found[0]}, {"params": found[1], "lr": 0.5, "weight_decay": 0.0}]


@pytest.mark.parametrize("wrap", [None, ErrorFeedback])
def test_names_given_later_make_no_difference_and_leave_groups_alone(wrap):
    """Names may be given after a scheduler was made, which has one function per group."""
    make = partial(MuonAdamW, lr=0.1, adamw_lr=0.03, newton_schulz_dtype="float32")
    make = make if wrap is None else partial(wrap, base=make)
    trained = []
    for named in (True, False):
        module = model()
        optimizer = make(groups(module, named))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda t: 1 / (t + 1), lambda t: 0.5**t])
        before = [dict(group, params=list(group["params"])) for group in optimizer.param_groups]
        if not named:
            optimizer.name_parameters({p: name for name, p in module.named_parameters()})
        assert [group.keys() for group in optimizer.param_groups] == [group.keys() for group in before]
        for old, group in zip(before, optimizer.param_groups):
            assert all(p is q for p, q in zip(old["params"], group["params"], strict=True))
            assert old["lr"] == group["lr"]
        for seed in range(3):
            step(optimizer, module.parameters(), seed)
            scheduler.step()
        trained.append(module)
    assert all(torch.equal(p, q) for p, q in zip(*(module.parameters() for module in trained)))


def test_a_step_without_names_says_what_to_do():
    module = model()
    optimizer = MuonAdamW(module.parameters())
    with pytest.raises(ValueError, match=r"has no name\. Make the optimizer from module\.named_parameters\(\), or"):
        step(optimizer, module.parameters())
    vector = nn.Parameter(torch.ones(3))  # needs no name
    step(MuonAdamW([vector]), [vector])
    assert not vector.eq(1).any()


def test_a_group_may_choose():
    module = model()
    groups = [
        {"params": module["up"].parameters(), "use_muon": True},
        {"params": [module["down"].weight, module["embed"].weight], "use_muon": False},
        {"params": [module["down"].bias]},
    ]
    optimizer = MuonAdamW(groups, newton_schulz_dtype="float32")
    step(optimizer, module.parameters())
    assert [p for p in module.parameters() if is_muons(optimizer, p)] == [module["up"].weight]


def test_learning_rates_and_decays_of_adamw():
    """A group's own values apply to both algorithms, unless it sets AdamW's as well; schedulers change both rates."""
    groups = [{}, {"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.1, "adamw_lr": 0.05}]
    expected = [(0.01, 0.3), (0.05, 0.0), (0.025, 0.3)]
    vectors, twins = ([nn.Parameter(torch.ones(3)) for _ in groups] for _ in range(2))
    each = [{"params": [p], **group} for p, group in zip(vectors, groups)]
    with pytest.raises(ValueError, match=r"^lr=0\.0: must be above 0, as adamw_lr=0\.02"):
        MuonAdamW(vectors, lr=0.0, adamw_lr=0.02)
    optimizer = MuonAdamW(each, lr=0.2, adamw_lr=0.02, adamw_weight_decay=0.3)
    for group in optimizer.param_groups:
        group["lr"] /= 2
    step(optimizer, vectors)
    each = [{"params": [p], "lr": lr, "weight_decay": decay} for p, (lr, decay) in zip(twins, expected)]
    step(torch.optim.AdamW(each, betas=(0.9, 0.95), fused=True), twins)
    torch.testing.assert_close(vectors, twins)

"""Which parameters go to Muon and which to AdamW: by names, given early or late, inside the groups as they are."""

from __future__ import annotations

import copy
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW, NorMuonAdamW, WeightPrediction

MUON = [
    ("layers.0.attention.q_proj.weight", (8, 8)),
    ("3.mlp.down.weight", (8, 32)),
    ("layers.0.moe.experts.up", (4, 8, 16)),
    ("layers.0.moe.router.weight", (4, 8)),
    ("bert.layer.0.output.dense.weight", (8, 32)),
    ("layers.0.attention.heads_mix.weight", (8, 8)),
    ("ensemble.member.weight", (8, 8)),
    ("layers.0.moe.shared.up.weight", (16, 8)),
    ("decoder.block.0.layer.0.SelfAttention.q.weight", (8, 8)),
]
ADAMW = [
    ("model.tok_embeddings.weight", (100, 8)),
    ("tok_emb.weight", (100, 8)),
    ("transformer.wte.weight", (100, 8)),
    ("transformer.wpe.weight", (16, 8)),
    ("lm_head.weight", (100, 8)),
    ("model.head.proj.weight", (100, 8)),
    ("output.weight", (100, 8)),
    ("shared.weight", (100, 8)),
    ("score.weight", (3, 8)),
    ("cls.predictions.decoder.weight", (100, 8)),
    ("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (32, 4)),
    ("expert_embedding", (4, 8, 16)),
    ("layers.0.moe.experts.up_bias", (4, 16)),
    ("layers.0.attention.q_norm.weight", (4, 16)),
    ("layers.0.norm.weight", (8,)),
    ("temperature", ()),
    ("gate.weight", (1, 8)),
    ("gate.weight", (8, 1)),
    ("conv.weight", (8, 3, 3, 3)),
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
    """Of weights and of biases, with learning rates of their own."""
    found = ([], [])
    for name, p in module.named_parameters():
        found["bias" in name].append((name, p) if named else p)
    return [{"params": found[0]}, {"params": found[1], "lr": 0.5, "weight_decay": 0.0}]


@pytest.mark.parametrize("make", [MuonAdamW, NorMuonAdamW])
@pytest.mark.parametrize("wrap", [None, ErrorFeedback, WeightPrediction])
def test_names_given_later_make_no_difference_and_leave_groups_alone(make, wrap):
    """Schedulers are made in between, with a function for each group."""
    make = partial(make, lr=0.1, adamw_lr=0.03, newton_schulz_dtype="float32")
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
    vector = nn.Parameter(torch.ones(3))  # which needs none
    step(MuonAdamW([vector]), [vector])
    assert not vector.eq(1).any()


def test_a_group_may_choose():
    module = model()
    optimizer = MuonAdamW(
        [
            {"params": module["up"].parameters(), "use_muon": True},
            {"params": [module["down"].weight, module["embed"].weight], "use_muon": False},
            {"params": [module["down"].bias]},
        ],
        newton_schulz_dtype="float32",
    )
    step(optimizer, module.parameters())
    assert [p for p in module.parameters() if is_muons(optimizer, p)] == [module["up"].weight]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 4))], "use_muon": True, "lr": 7.0})
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-3, 1e-3, 7.0]


def test_pattern_is_an_argument():
    module = model()
    optimizer = MuonAdamW(module.named_parameters(), adamw_names="up", newton_schulz_dtype="float32")
    step(optimizer, module.parameters())
    assert [is_muons(optimizer, layer.weight) for layer in module.values()] == [True, False, True]


def test_learning_rates_and_decays_of_adamw():
    """A group that sets one for itself sets it for both algorithms; schedulers move both."""
    vectors = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = MuonAdamW(
        [
            {"params": vectors[:1]},
            {"params": vectors[1:2], "lr": 0.1, "weight_decay": 0.0},
            {"params": vectors[2:], "lr": 0.1, "adamw_lr": 0.05},
        ],
        lr=0.2,
        adamw_lr=0.02,
        adamw_weight_decay=0.3,
    )
    for group in optimizer.param_groups:
        group["lr"] /= 2
    step(optimizer, vectors)
    twins = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    options = [(0.01, 0.3), (0.05, 0.0), (0.025, 0.3)]
    reference = torch.optim.AdamW(
        [{"params": [p], "lr": lr, "weight_decay": decay} for p, (lr, decay) in zip(twins, options)],
        betas=(0.9, 0.95),
        fused=True,
    )
    step(reference, twins)
    torch.testing.assert_close(vectors, twins)


@pytest.mark.parametrize("wrap", [None, ErrorFeedback])
def test_pruned_groups_step_as_the_whole_model_and_let_go_of_the_rest(wrap):
    """A pipeline stage takes the other stages' parameters out of the groups, which may become empty."""
    make = partial(MuonAdamW, lr=0.1, newton_schulz_dtype="float32")
    make = make if wrap is None else partial(wrap, base=make)
    whole, stage = model(), model()
    optimizers = [make(groups(module, named=True)) for module in (whole, stage)]
    own = set(stage["embed"].parameters())
    gone = weakref.ref(stage["up"].weight)
    for group in optimizers[1].param_groups:
        group["params"][:] = [p for p in group["params"] if p in own]
    embedding = stage["embed"]
    del stage, own, group
    assert gone() is None
    assert [len(group["params"]) for group in optimizers[1].param_groups] == [1, 0]
    for seed in range(3):
        step(optimizers[0], whole.parameters(), seed)
        step(optimizers[1], embedding.parameters(), seed)
    assert torch.equal(embedding.weight, whole["embed"].weight)


def test_one_optimizer_may_step_a_stage_at_a_time():
    """Lists of parameters are swapped in place, as is a stage's learning rate."""
    whole, cut = model(), model()
    make = partial(ErrorFeedback, base=partial(MuonAdamW, newton_schulz_dtype="float32"))
    optimizers = [make(module.named_parameters()) for module in (whole, cut)]
    for seed in range(3):
        step(optimizers[0], whole.parameters(), seed)
        for i, p in enumerate(cut.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * seed + i))
        (group,) = optimizers[1].param_groups
        everything = list(group["params"])
        for layer in cut.values():
            group["params"][:] = list(layer.parameters())
            optimizers[1].step()
        group["params"][:] = everything
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), cut.parameters()))


def test_a_copy_knows_the_names_in_its_groups():
    module = model()
    optimizer = ErrorFeedback(module.named_parameters(), partial(MuonAdamW, newton_schulz_dtype="float32"))
    step(optimizer, module.parameters())
    twin, copied = copy.deepcopy((module, optimizer))
    for m, o in ((module, optimizer), (twin, copied)):
        step(o, m.parameters(), 1)
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), twin.parameters()))
    assert copied.param_groups is copied.base.param_groups

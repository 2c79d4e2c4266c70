"""The rule that sends parameters to Muon or to AdamW, and the errors of what cannot be split."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from lightning_asyncpp.optim import MuonAdamW
from lightning_asyncpp.optim.split import DEFAULT_ADAMW_NAMES, algorithm_for

RULES = [
    ("layers.0.attention.q_proj.weight", (8, 8), "muon"),
    ("3.mlp.down.weight", (8, 32), "muon"),
    ("layers.0.moe.experts.up", (4, 8, 16), "muon"),
    ("layers.0.moe.router.weight", (4, 8), "muon"),
    ("bert.layer.0.output.dense.weight", (8, 32), "muon"),
    ("layers.0.attention.heads_mix.weight", (8, 8), "muon"),
    ("ensemble.member.weight", (8, 8), "muon"),
    ("model.tok_embeddings.weight", (100, 8), "adamw"),
    ("tok_emb.weight", (100, 8), "adamw"),
    ("transformer.wte.weight", (100, 8), "adamw"),
    ("transformer.wpe.weight", (16, 8), "adamw"),
    ("lm_head.weight", (100, 8), "adamw"),
    ("model.head.proj.weight", (100, 8), "adamw"),
    ("output.weight", (100, 8), "adamw"),
    ("shared.weight", (100, 8), "adamw"),
    ("layers.0.moe.shared.up.weight", (16, 8), "muon"),
    ("score.weight", (3, 8), "adamw"),
    ("cls.predictions.decoder.weight", (100, 8), "adamw"),
    ("decoder.block.0.layer.0.SelfAttention.q.weight", (8, 8), "muon"),
    ("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (32, 4), "adamw"),
    ("expert_embedding", (4, 8, 16), "adamw"),
    ("layers.0.moe.experts.up_bias", (4, 16), "adamw"),
    ("layers.0.attention.q_norm.weight", (4, 16), "adamw"),
    ("layers.0.norm.weight", (8,), "adamw"),
    ("layers.0.mlp.up.bias", (32,), "adamw"),
    ("temperature", (), "adamw"),
    ("gate.weight", (1, 8), "adamw"),
    ("gate.weight", (8, 1), "adamw"),
    ("conv.weight", (8, 3, 3, 3), "adamw"),
    (None, (8,), "adamw"),
    (None, (8, 3, 3, 3), "adamw"),
    (None, (8, 8), None),
    (None, (2, 8, 8), None),
]


@pytest.mark.parametrize(("name", "shape", "expected"), RULES)
def test_rule(name, shape, expected):
    assert algorithm_for(name, shape, re.compile(DEFAULT_ADAMW_NAMES)) == expected


def groups_of(*args, **kwargs):
    optimizer = MuonAdamW(*args, **kwargs)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"]
    return [group.get("param_names") for group in optimizer.param_groups]


def test_named_parameters_are_split_in_order():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "up": nn.Linear(4, 6), "down": nn.Linear(6, 4)})
    assert groups_of(model.named_parameters()) == [
        ["up.weight", "down.weight"],
        ["embed.weight", "up.bias", "down.bias"],
    ]


def test_pattern_is_an_argument():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "up": nn.Linear(4, 6, bias=False)})
    assert groups_of(model.named_parameters(), adamw_names="up") == [["embed.weight"], ["up.weight"]]


def test_explicit_groups_with_options_and_without_names():
    matrix, vector, embedding = (nn.Parameter(torch.ones(s)) for s in [(3, 4), (4,), (5, 4)])
    optimizer = MuonAdamW(
        [
            {"params": [embedding], "algorithm": "adamw", "lr": 0.5},
            {"params": matrix, "algorithm": "muon"},
            {"params": [vector]},
        ],
        lr=0.1,
    )
    muon, adamw = optimizer.param_groups
    assert [id(p) for p in muon["params"] + adamw["params"]] == [id(p) for p in (matrix, embedding, vector)]
    assert (muon["lr"], adamw["lr"]) == (0.1, 0.5)
    assert "param_names" not in muon
    assert "param_names" not in adamw


def test_groups_of_another_optimizer_are_understood():
    model = nn.Linear(3, 4)
    groups = [{k: g[k] for k in ("params", "param_names")} for g in MuonAdamW(model.named_parameters()).param_groups]
    assert groups_of(groups) == [["weight"], ["bias"]]


@pytest.mark.parametrize("missing", ["muon", "adamw"])
def test_a_stage_may_lack_one_algorithm(missing):
    params = {"muon": [("up.weight", nn.Parameter(torch.ones(3, 4)))], "adamw": [("b", nn.Parameter(torch.ones(4)))]}
    del params[missing]
    names = groups_of(next(iter(params.values())))
    assert names[["muon", "adamw"].index(missing)] == []


def test_unnamed_vectors_are_decidable_and_unnamed_matrices_are_not():
    assert groups_of([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(()))]) == [None, None]
    with pytest.raises(ValueError, match=r"2 parameter\(s\) without a name.*\(4, 3\).*named_parameters"):
        MuonAdamW([*nn.Linear(3, 4).parameters(), *nn.Linear(3, 4).parameters()])


def test_all_problems_at_once():
    with pytest.raises(ValueError, match="cannot be set up") as error:
        MuonAdamW(
            nn.Linear(3, 4).parameters(),
            lr=-1.0,
            momentum=1.0,
            adamw_betas=(0.9, 1.5),
            newton_schulz_dtype="int8",
            adjust_lr="bogus",
            adamw_names="(",
        )
    for word in (
        "lr (muon)",
        "lr (adamw)",
        "momentum",
        "betas",
        "int8",
        "bogus",
        "regular expression",
        "without a name",
    ):
        assert word in str(error.value)


MATRIX = nn.Parameter(torch.ones(3, 4))
VECTOR = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([], "no parameters"),
        ([("a", MATRIX), VECTOR], "name all of them or none"),
        ([("a", MATRIX), ("b", MATRIX)], "more than once"),
        ([("a", "text")], "got str"),
        ([{"params": [VECTOR], "algorithm": "muon"}], "2-D or 3-D"),
        ([{"params": [VECTOR], "algorithm": "sgd"}], "muon, adamw"),
        ([{"params": [VECTOR], "lr": 0.1}], "must also say algorithm"),
        ([{"params": [VECTOR], "algorithm": "adamw", "momentum": 0.1}], r"cannot set \['momentum'\]"),
        (
            [
                {"params": [VECTOR], "algorithm": "adamw", "lr": 0.1},
                {"params": [nn.Parameter(torch.ones(2))], "algorithm": "adamw", "lr": 0.2},
            ],
            "disagree on lr",
        ),
        ([("a", nn.Parameter(torch.ones(3, 4, dtype=torch.complex64)))], "floating point"),
    ],
)
def test_errors(params, message):
    with pytest.raises(ValueError, match=message):
        MuonAdamW(params)


def test_no_third_group():
    optimizer = MuonAdamW(nn.Linear(3, 4).named_parameters())
    with pytest.raises(ValueError, match="exactly two parameter groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})

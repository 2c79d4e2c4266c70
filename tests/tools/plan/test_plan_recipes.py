"""Every recipe is planned as a user does it, its model built on the meta device: as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_asyncpp.models import GPTConfig
from lightning_asyncpp.tools.plan.plan import main

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))
QUICK: dict[str, list[str]] = {"quickstart_moe": ["--no-search"]}


@pytest.mark.parametrize(
    ("path", "arguments"),
    [pytest.param(path, QUICK[path.stem], id=path.stem) for path in RECIPES if path.stem in QUICK]
    + [pytest.param(path, [], id=f"{path.stem}-searched", marks=pytest.mark.slow) for path in RECIPES],
)
def test_a_recipe_is_planned(
    path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main([str(path), *arguments, "--json", str(tmp_path / "plan.json")])  # it fits an H100, or this would raise
    table, plan = capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())
    recipe = yaml.safe_load(path.read_text())
    check_size(plan, recipe)
    check_memory(plan, table)
    check_speed(plan, recipe, table)
    assert plan["notes"] == []  # nothing was loaded or taken for granted
    assert (plan["limits"] is None) == bool(arguments)
    assert ("largest micro-batch" in table) == (not arguments)


def check_size(plan: dict[str, Any], recipe: dict[str, Any]) -> None:
    trainer, data = recipe["trainer"], recipe["data"]["init_args"]
    config = GPTConfig(**recipe["model"]["init_args"]["config"])
    pipeline = plan["pipeline"]
    devices = trainer["devices"] * trainer.get("num_nodes", 1)
    assert pipeline["devices"] == pipeline["stages"] == len(plan["stages"]) == devices
    assert pipeline["micro_batches"] == trainer["strategy"]["init_args"]["micro_batches"]
    assert sum(pipeline["partition"]) == config.num_layers + 2
    assert pipeline["partition_chosen"] == "by pipeline_costs()"
    assert plan["parameters"] == config.num_parameters()
    shared = config.vocab_size * config.dim if config.tie_embeddings else 0
    assert sum(stage["parameters"] for stage in plan["stages"]) == config.num_parameters() + shared
    assert plan["samples_per_update"] == data["batch_size"]
    assert plan["tokens_per_update"] == data["batch_size"] * config.context_length


def check_memory(plan: dict[str, Any], table: str) -> None:
    unit = 2**30 if any(stage["bytes"]["total"] > 2**30 for stage in plan["stages"]) else 2**20
    lines = table.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("stage  layers"))
    for line, stage in zip(lines[begin + 1 :], plan["stages"]):
        parts, cells = stage["bytes"], line.split()
        assert parts["total"] == sum(
            size for name, size in parts.items() if name not in ("total", "in_flight", "during")
        )
        assert parts["weights"] == 4 * stage["parameters"]
        assert cells[-4:] == [f"{parts['total'] / unit:.2f}", str(parts["in_flight"]), parts["during"], "yes"]


def check_speed(plan: dict[str, Any], recipe: dict[str, Any], table: str) -> None:
    config = GPTConfig(**recipe["model"]["init_args"]["config"])
    per_token = plan["flops_per_sample"] / config.context_length
    # A backward of attention computes its scores once more, selective checkpointing everything that is no product.
    assert config.flops_per_token() < per_token < 1.1 * config.flops_per_token()
    # No stage works faster than the assumed share of the peak.
    least = plan["flops_per_sample"] * plan["samples_per_update"] / len(plan["stages"]) / (0.4 * 989e12)
    steps = {name: plan[name]["step"] for name in ("predicted", "synchronous", "asynchronous")}
    assert least < steps["asynchronous"] < steps["synchronous"]
    asynchronous = plan["pipeline"]["delay"] == 1
    assert steps["predicted"] == steps["asynchronous" if asynchronous else "synchronous"]
    assert f"{steps['synchronous'] / steps['asynchronous']:.2f}x" in table
    assert f"{plan['predicted']['tokens_per_second']:,.0f}" in table

"""Planned memory agrees with the memory of real processes, stage by stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lightning_asyncpp.lightning_cli.command import read_configuration
from lightning_asyncpp.tools.plan.devices import DEVICES
from lightning_asyncpp.tools.plan.estimate import Estimate
from lightning_asyncpp.tools.plan.recipe import build
from tests.tools.plan.cases import CASES, Case
from tests.tools.plan.measured import measure


def planned(case: Case, folder: Path) -> list[int]:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(case.recipe()))
    recipe = build(read_configuration(["fit", "--config", str(path)]))
    return [memory.total for memory in Estimate(recipe, DEVICES["cpu"]).memory]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_processes_take_what_was_planned(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected, taken = planned(case, tmp_path), measure(case.recipe(), case.devices)
    told = [f"{a / 2**20:.1f} MiB planned, {b / 2**20:.1f} taken" for a, b in zip(expected, taken)]
    print(name, *told, sep="; ")
    assert all(abs(a / b - 1) < 0.05 for a, b in zip(expected, taken)), told

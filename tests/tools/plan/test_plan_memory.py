"""Planned memory against that of real processes, stage by stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lightning_asyncpp.lightning_cli.command import read_configuration
from lightning_asyncpp.tools.plan.recipe import build
from lightning_asyncpp.tools.plan.stages import Stages
from tests.tools.plan.cases import CASES, Case
from tests.tools.plan.measured import measure


def planned(case: Case, folder: Path) -> list[int]:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(case.recipe()))
    recipe = build(read_configuration(["fit", "--config", str(path)]))
    return [m.total for m in Stages(recipe, recipe.settings.resolved(recipe.devices), on_gpu=False).memory()]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_processes_take_what_was_planned(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected, taken = planned(case, tmp_path), measure(case.recipe(), case.devices)
    told = [f"{a / 2**20:.1f} MiB planned, {b / 2**20:.1f} taken" for a, b in zip(expected, taken)]
    print(name, *told, sep="; ")
    assert all(abs(a / b - 1) < 0.05 for a, b in zip(expected, taken)), told

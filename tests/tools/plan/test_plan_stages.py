"""What is looked at once for several stages, and batches that are not made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from lightning_asyncpp.lightning_cli.command import read_configuration
from lightning_asyncpp.tools.plan.devices import DEVICES
from lightning_asyncpp.tools.plan.planned_recipe import Recipe, build, resized
from lightning_asyncpp.tools.plan.question import Room
from lightning_asyncpp.tools.plan.stages import Stages
from lightning_asyncpp.tools.plan.timing import Speeds
from tests.tools.plan.test_plan_command import plain


def recipe_of(module: str, folder: Path, devices: int) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(plain(module, partition=[1] * (devices - 1) + [2], micro_batches=8)))
    return build(read_configuration(["fit", "--config", str(path)]), devices)


def test_a_stage_that_shares_a_weight_does_not_stand_for_one_that_has_its_own(tmp_path: Path) -> None:
    recipe = recipe_of("Shared", tmp_path, 5)
    stages = Stages(recipe, recipe.settings.resolved(5), on_gpu=False)
    slots = stages.profiles(8, recipe.batch_size)
    assert [slots[stage][0].tied for stage in range(5)] == [0, 64 * 64 * 4, 0, 0, 64 * 64 * 4]
    assert slots[2] == slots[3]


def test_a_recipe_is_planned_in_a_job_of_slurm_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NTASKS": "4", "JOB_NAME": "train", "JOB_ID": "7", "NODELIST": "here"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert recipe_of("Shared", tmp_path, 2).devices == 2


def test_a_batch_that_is_only_tried_takes_no_memory() -> None:
    batch = {"x": torch.arange(8.0).view(2, 4), "scale": torch.ones(3)}
    assert resized(batch, 2, 2) is batch
    wide = resized(batch, 2, 10**12)
    assert wide["x"].shape == (10**12, 4)
    assert wide["x"].nbytes == 16 * 10**12
    assert wide["x"].untyped_storage().nbytes() == 32
    assert wide["scale"] is batch["scale"]


@pytest.mark.parametrize(("name", "memory"), [("h100", 40.0), ("cpu", 20.0)])
def test_devices_of_this_machine_share_its_memory(name: str, memory: float) -> None:
    room = Room(Speeds(DEVICES[name], 0.4, 0.7, 8), 40.0, 0.0)
    assert room.shared_by(4, before=2).memory_gib == memory

"""Jobs for Lightning Studios are refused if they cannot work, and otherwise submitted as the SDK accepts them."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

with suppress(ImportError):  # not in a test: it asks for the file number of stderr, which capsys's stream lacks
    import lightning_sdk  # noqa: F401

ROOT = Path(__file__).parents[1]
SMOLLM = "recipes/smollm_360m.yaml"
QUICKSTART = "recipes/quickstart.yaml"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("studio_job", ROOT / "recipes" / "studio_job.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["studio_job"] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


studio_job: Any = load_script()


@pytest.fixture(autouse=True)
def outside_of_a_studio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(studio_job.IN_STUDIO, raising=False)
    monkeypatch.chdir(ROOT)


def planned(*arguments: str, studio: str | None = "mine") -> Any:
    given = [*arguments, *(["--studio", studio] if studio else [])]
    return studio_job.make_plan(*studio_job._parser().parse_known_args(given))


def test_one_machine(capsys: pytest.CaptureFixture[str]) -> None:
    studio_job.main([
        SMOLLM, "--machine", "L40S_X_4", "--studio", "mine", "--teamspace", "me/room", "--name", "first",
        "--folder", "repo", "--env", "WANDB_MODE=offline", "--env", "EMPTY=", "--interruptible", "--max-attempts", "3",
        "--trainer.max_steps", "1000", "--model.init_args.config.dropout=0.1",
        "--dry-run", "--json",
    ])  # fmt: skip
    assert json.loads(capsys.readouterr().out) == {
        "call": "lightning_sdk.Job.run",
        "notes": [],
        "arguments": {
            "name": "first",
            "machine": "L40S_X_4",
            "studio": "mine",
            "teamspace": "me/room",
            "env": {"WANDB_MODE": "offline", "EMPTY": ""},
            "interruptible": True,
            "max_run_attempts": 3,
            "command": "cd repo && (command -v asyncpp >/dev/null || { pip install -e .; }) && asyncpp fit "
            "--config recipes/smollm_360m.yaml --trainer.max_steps 1000 --model.init_args.config.dropout=0.1 "
            "--trainer.devices 4 --trainer.num_nodes 1",
        },
    }


def test_several_machines_share_the_devices_of_the_recipe() -> None:
    plan = planned(SMOLLM, "--machine", "L40S_X_2", "--num-machines", "2", "--folder", "/home/my repo")
    assert plan.problems == plan.notes == []
    assert plan.submission()["num_machines"] == 2
    assert plan.command() == (
        "cd '/home/my repo' && (command -v asyncpp >/dev/null || { pip install -e .; }) && "
        ': "${MASTER_ADDR:?is not set on this machine}" && : "${NODE_RANK:?is not set on this machine}" && '
        'torchrun --nnodes 2 --nproc-per-node 2 --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" '
        '--master-port "${MASTER_PORT:-29500}" -m lightning_asyncpp fit --config recipes/smollm_360m.yaml '
        "--trainer.devices 2 --trainer.num_nodes 2"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("recipes/absent.yaml", "--machine", "L4"), "recipes/absent.yaml: there is no such file"),
        ((SMOLLM, "--machine", "CPU"), "--machine CPU: has no GPU, and the recipe has accelerator=gpu"),
        ((SMOLLM, "--machine", "L4_X_4", "--num-machines", "3"), "the recipe's 4 devices cannot be spread evenly"),
        (
            (SMOLLM, "--machine", "L4_X_4", "--trainer.strategy.init_args.microbatches", "3"),
            "microbatches=3 is smaller than the number of stages (4)",
        ),
        ((SMOLLM, "--machine", "L4_X_4", "--trainr.max_steps", "3"), "--trainr.max_steps: unknown; overrides"),
        ((SMOLLM, "--machine", "L4_X_4", "--trainer.devices=2"), "--trainer.devices: is set from --devices"),
    ],
    ids=["file", "no-gpu", "uneven", "microbatches", "misspelt", "set-here"],
)
def test_what_does_not_fit_is_refused(arguments: tuple[str, ...], message: str) -> None:
    (problem,) = planned(*arguments).problems
    assert message in problem


def test_submitting(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def submit(name: str, machine: Any, num_machines: int = 1, **rest: Any) -> Any:
        calls.append({"name": name, "machine": machine, "num_machines": num_machines, **rest})
        return SimpleNamespace(link="https://job")

    calls: list[dict[str, Any]] = []
    machine = SimpleNamespace(from_str=lambda name: f"machine {name}")
    place = lambda name, **owner: (name, owner)  # noqa: E731
    fake = SimpleNamespace(Job=SimpleNamespace(run=submit), Machine=machine, Teamspace=place)
    monkeypatch.setitem(sys.modules, "lightning_sdk", fake)
    monkeypatch.setattr(studio_job, "find_spec", lambda name: object())
    where = ["--studio", "mine", "--teamspace", "room", "--org", "us"]
    studio_job.main([QUICKSTART, "--machine", "CPU", "--name", "n", "--num-machines", "2", *where])
    (submitted,) = calls
    assert (submitted["machine"], submitted["num_machines"]) == ("machine CPU", 2)
    assert submitted["teamspace"] == ("room", {"org": "us"})
    assert "org" not in submitted
    assert "https://job" in capsys.readouterr().out


def test_the_installed_sdk_takes_what_is_submitted() -> None:
    sdk = pytest.importorskip("lightning_sdk", reason='not part of the extra "test": pip install -e ".[studio]"')
    submission = planned(
        SMOLLM, "--machine", "L4_X_2", "--num-machines", "2", "--teamspace", "t", "--env", "A=B", "--max-attempts", "2",
        "--interruptible", "--org", "o",
    ).submission()  # fmt: skip
    assert set(submission) >= {"name", "machine", "num_machines", "command", "studio", "teamspace", "env", "org"}
    inspect.signature(sdk.Job.run).bind(**submission)
    inspect.signature(sdk.MMT.run).bind(**submission)
    assert sdk.Machine.from_str(submission["machine"]) == sdk.Machine.L4_X_2

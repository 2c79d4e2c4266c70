"""Jobs for Lightning Studios: what is submitted, what is refused before, and that the SDK takes it."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
from contextlib import nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

with suppress(ImportError):  # here, as it asks for the number of the standard error output, which capsys has not
    import lightning_sdk  # noqa: F401

ROOT = Path(__file__).parents[1]
SMOLLM = "recipes/smollm_360m.yaml"
QUICKSTART = "recipes/quickstart.yaml"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("studio_job", ROOT / "recipes" / "studio_job.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["studio_job"] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


studio_job: Any = load_script()
read_recipe = studio_job.read_recipe


@lru_cache
def read_once(recipe: Path, overrides: tuple[str, ...]) -> Any:
    return read_recipe(recipe, overrides)


@pytest.fixture(autouse=True)
def outside_of_a_studio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(studio_job.IN_STUDIO, raising=False)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(studio_job, "read_recipe", lambda recipe, overrides: read_once(recipe, tuple(overrides)))


def planned(*arguments: str, studio: str | None = "mine") -> Any:
    given = [*arguments, *(["--studio", studio] if studio else [])]
    return studio_job.make_plan(*studio_job._parser().parse_known_args(given))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    studio_job.main([*arguments, "--dry-run", "--json"])
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_one_machine(capsys: pytest.CaptureFixture[str]) -> None:
    content = shown(
        capsys, SMOLLM, "--machine", "L40S_X_4", "--studio", "mine", "--teamspace", "me/room", "--name", "first",
        "--folder", "repo", "--env", "WANDB_MODE=offline", "--env", "EMPTY=", "--interruptible", "--max-attempts", "3",
        "--trainer.max_steps", "1000", "--model.init_args.config.dropout=0.1",
    )  # fmt: skip
    assert content == {
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


def test_a_machine_without_the_addresses_stops_at_once(tmp_path: Path) -> None:
    command = planned(SMOLLM, "--machine", "L4_X_2", "--num-machines", "2", "--install", "true").command()
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "started $@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    alone = subprocess.run(["bash", "-ec", command], env=environment, capture_output=True, text=True)
    assert alone.returncode != 0
    assert "MASTER_ADDR: is not set on this machine" in alone.stderr
    assert "started" not in alone.stdout
    several = {**environment, "MASTER_ADDR": "10.0.0.1", "NODE_RANK": "1"}
    for shell in ("bash", "sh"):
        done = subprocess.run([shell, "-ec", command], env=several, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "--node-rank 1 --master-addr 10.0.0.1 --master-port 29500 -m lightning_asyncpp fit" in done.stdout


def test_inside_a_studio_its_own_environment_and_folder_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(studio_job.IN_STUDIO, "id")
    plan = planned(QUICKSTART, "--machine", "CPU", studio=None)
    assert plan.problems == []
    assert "studio" not in plan.submission()
    assert plan.command().startswith(f"cd {ROOT} && ")
    assert plan.notes == []
    assert planned(QUICKSTART, "--machine", "CPU", "--image", "x", studio=None).command().startswith("(command -v")


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_the_package_is_installed_where_only_its_folder_is(tmp_path: Path, shell: str) -> None:
    """Python would import it from the folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "python").symlink_to("/bin/true")
    install = f"cp {tmp_path}/tool bin/asyncpp && chmod +x bin/asyncpp; echo installed"
    (tmp_path / "tool").write_text('#!/bin/sh\necho "runs $@"\n')
    command = planned(QUICKSTART, "--machine", "CPU", "--folder", str(tmp_path), "--install", install).command()
    for said in (["installed", "runs fit"], ["runs fit"]):
        environment = {"PATH": f"{tmp_path}/bin:{tmp_path}:/usr/bin:/bin"}
        done = subprocess.run([shell, "-ec", command], env=environment, capture_output=True, text=True, check=True)
        assert [line[: len(part)] for line, part in zip(done.stdout.splitlines(), said, strict=True)] == said


def test_names_of_machines_are_the_sdks() -> None:
    assert planned(SMOLLM, "--machine", "l40s_x_4").submission()["machine"] == "L40S_X_4"
    assert planned(SMOLLM, "--machine", "p5.48xlarge").submission()["machine"] == "p5.48xlarge"


def test_all_problems_at_once() -> None:
    plan = planned(
        SMOLLM, "--machine", "L4", "--num-machines", "3", "--devices", "7", "--image", "x", "--org", "a", "--user", "b",
        "--teamspace", "o/t", "--name", "a b", "--env", "NO", "--max-attempts", "0",
        "--trainer.strategy.init_args.data_parallel_size", "2",
    )  # fmt: skip
    told = "\n".join(plan.problems)
    for part in (
        "--studio mine and --image x: give one",
        "--org a and --user b: a teamspace has one owner",
        "--teamspace o/t names its owner: leave out --org and --user",
        "--name 'a b': letters",
        "--env 'NO': must be NAME=VALUE",
        "--max-attempts 0: must be at least 1",
        "devices=21 is not divisible by data_parallel_size=2",
        "--machine L4: has 1 GPU(s), and 7 devices are wanted on it",
    ):
        assert part in told
    assert len(plan.problems) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("recipes/absent.yaml", "--machine", "L4"), "recipes/absent.yaml: there is no such file"),
        ((str(ROOT / QUICKSTART), "--machine", "CPU"), "give it relative to the folder that the machines have too"),
        ((SMOLLM, "--machine", "CPU"), "--machine CPU: has no GPU, and the recipe has accelerator=gpu"),
        ((SMOLLM, "--machine", "L4_X_4", "--num-machines", "3"), "the recipe's 4 devices cannot be spread evenly"),
        ((SMOLLM, "--machine", "H100_X_8", "--num-machines", "0"), "--num-machines 0: must be at least 1"),
        (
            (SMOLLM, "--machine", "H100_X_8", "--num-machines", "5", "--devices", "8"),
            "40 stages for 32 blocks, an embedding and a head; use fewer devices, or replicas",
        ),
        (
            (SMOLLM, "--machine", "L4_X_4", "--trainer.strategy.init_args.microbatches", "3"),
            "microbatches=3 is smaller than the number of stages (4)",
        ),
        ((SMOLLM, "--machine", "L4_X_4", "--trainr.max_steps", "3"), "--trainr.max_steps: unknown; overrides"),
        ((SMOLLM, "more", "--machine", "L4_X_4"), "more: unknown; overrides"),
        ((SMOLLM, "--machine", "L4_X_4", "--trainer.devices=2"), "--trainer.devices: is set from --devices"),
        ((SMOLLM, "--machine", "L4_X_4", "--trainer.nothing", "2"), "unrecognized arguments: --trainer.nothing"),
        (
            (SMOLLM, "--machine", "L4_X_4", "--trainer.max_steps", "many"),
            "Parser key \"trainer.max_steps\": Expected a <class 'int'>. Got value: many",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[str, ...], message: str) -> None:
    (problem,) = planned(*arguments).problems
    assert message in problem


def test_neither_studio_nor_image_is_refused_before_anything_is_submitted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studio_job, "submit", lambda _: pytest.fail("submitted"))
    with pytest.raises(SystemExit, match="2"):
        studio_job.main([QUICKSTART, "--machine", "CPU"])
    assert "nothing was submitted:\n  - --studio or --image is missing" in capsys.readouterr().err


def test_idle_and_unknown_machines_are_noted() -> None:
    folder = ("--folder", "repo")
    assert planned(SMOLLM, "--machine", "H100_X_8", *folder).notes == ["4 of 8 GPUs of H100_X_8 stay idle"]
    (note,) = planned(QUICKSTART, "--machine", "L4", *folder).notes
    assert note == "the recipe has accelerator=cpu: the GPUs of L4 stay idle"
    (note,) = planned(SMOLLM, "--machine", "p5.48xlarge", *folder).notes
    assert note == "p5.48xlarge is none of the machines that the SDK lists: its number of GPUs was not checked"


def test_recipes_without_a_pipeline_are_left_to_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = yaml.safe_load((ROOT / QUICKSTART).read_text())
    config["trainer"]["strategy"] = "ddp"
    (tmp_path / "ddp.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    assert planned("ddp.yaml", "--machine", "CPU", "--devices", "3").problems == []
    config["trainer"].update(strategy="async_pipeline", devices="auto")
    (tmp_path / "auto.yaml").write_text(yaml.safe_dump(config))
    assert "trainer.devices='auto' of the recipe is no number" in planned("auto.yaml", "--machine", "CPU").problems[0]
    assert planned("auto.yaml", "--machine", "CPU", "--devices", "3").problems == []
    config["trainer"]["devices"] = -1
    (tmp_path / "auto all.yaml").write_text(yaml.safe_dump(config))
    everything = planned("auto all.yaml", "--machine", "CPU")
    assert "trainer.devices=-1 of the recipe is no number" in everything.problems[0]
    assert everything.arguments["name"].startswith("auto-all-2")


def test_a_table_shows_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    studio_job.main([QUICKSTART, "--machine", "L4", "--studio", "mine", "--name", "n", "--dry-run"])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["call", "lightning_sdk.Job.run"] in lines
    assert ["command", planned(QUICKSTART, "--machine", "L4").command()] in lines
    assert ["note", "the recipe has accelerator=cpu: the GPUs of L4 stay idle"] in lines


@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.parametrize("sdk", ["new", "old"])
def test_submitting(
    machines: int, sdk: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def new(name: str, machine: Any, num_machines: int = 1, **rest: Any) -> Any:
        calls.append(("Job", {"name": name, "machine": machine, "num_machines": num_machines, **rest}))
        return SimpleNamespace(link="https://job")

    def old(name: str, machine: Any, studio: str, command: str, interruptible: bool) -> Any:
        calls.append(("Job", {"name": name, "machine": machine, "studio": studio, "command": command}))
        return SimpleNamespace(link="https://job")

    def several(name: str, num_machines: int, **rest: Any) -> Any:
        calls.append(("MMT", {"name": name, "num_machines": num_machines, **rest}))
        return SimpleNamespace(link="https://job")

    class Machine:
        @staticmethod
        def from_str(name: str) -> str:
            return f"machine {name}"

    job = SimpleNamespace(run=new if sdk == "new" else old)
    place = lambda name, **owner: (name, owner)  # noqa: E731
    fake = SimpleNamespace(Job=job, MMT=SimpleNamespace(run=several), Machine=Machine, Teamspace=place)
    monkeypatch.setitem(sys.modules, "lightning_sdk", fake)
    monkeypatch.setattr(studio_job, "find_spec", lambda name: object())
    studio_job.main(
        [QUICKSTART, "--machine", "CPU", "--studio", "mine", "--name", "n", "--num-machines", str(machines)]
        + (["--teamspace", "room", "--org", "us"] if sdk == "new" else [])
    )
    ((kind, submitted),) = calls
    assert kind == ("MMT" if sdk == "old" and machines == 2 else "Job")
    assert submitted["machine"] == "machine CPU"
    assert submitted.get("teamspace") == (("room", {"org": "us"}) if sdk == "new" else None)
    assert "org" not in submitted
    assert submitted.get("num_machines", 1) == machines
    assert "https://job" in capsys.readouterr().out


def test_submitting_without_the_sdk_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning_sdk", None)
    with pytest.raises(SystemExit, match=r'pip install -e "\.\[studio\]", then lightning login'):
        studio_job.submit({"machine": "CPU"})


def test_what_the_sdk_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(**_: Any) -> None:
        raise ValueError("Studio 'mine' does not exist.")

    job, machine = SimpleNamespace(run=run), SimpleNamespace(from_str=str)
    monkeypatch.setitem(sys.modules, "lightning_sdk", SimpleNamespace(Job=job, Machine=machine))
    with pytest.raises(SystemExit, match=r"studio_job: the SDK refused: ValueError: Studio 'mine' does not exist\."):
        studio_job.submit({"machine": "CPU"})


def test_a_studio_of_a_teamspace_with_its_owner_is_taken_by_the_installed_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given as a text it is refused: the name of the Studio's teamspace has no owner."""
    sdk = pytest.importorskip("lightning_sdk", reason='not part of the extra "test": pip install -e ".[studio]"')
    room = type("Teamspace", (), {"name": "room", "__init__": lambda self, name: None})
    monkeypatch.setattr(sdk, "Teamspace", room)
    studio = type("Studio", (), {"__init__": lambda self, **_: None, "teamspace": room("room"), "cloud_account": "c"})
    monkeypatch.setattr("lightning_sdk.studio.Studio", studio)
    monkeypatch.setattr("lightning_sdk.job._resolve_default_cloud_account", lambda _: None)
    monkeypatch.setattr("lightning_sdk.job.skip_studio_setup", nullcontext)
    monkeypatch.setattr(sdk.Job, "__init__", lambda self, **given: setattr(self, "given", given))
    monkeypatch.setattr(sdk.Job, "_submit", lambda self, **_: None)
    monkeypatch.setattr(sdk.Job, "link", property(lambda self: self.given["teamspace"].name))
    submission = {"name": "n", "machine": "L4", "command": "true", "studio": "mine", "teamspace": "me/room"}
    assert studio_job.submit(submission) == "room"
    with pytest.raises(ValueError, match="does not match provided teamspace"):
        sdk.Job.run(**submission)


def test_a_dry_run_needs_no_sdk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "lightning_sdk", None)
    monkeypatch.setattr(studio_job, "find_spec", lambda name: None)
    content = shown(capsys, SMOLLM, "--machine", "A100_80GB_X_8", "--studio", "mine")
    assert content["notes"] == [
        "no --folder: recipes/smollm_360m.yaml must be in the folder that the job starts in",
        "4 of 8 GPUs of A100_80GB_X_8 stay idle",
    ]


def test_the_installed_sdk_takes_what_is_submitted() -> None:
    sdk = pytest.importorskip("lightning_sdk", reason='not part of the extra "test": pip install -e ".[studio]"')
    submission = planned(
        SMOLLM, "--machine", "L4_X_2", "--num-machines", "2", "--teamspace", "t", "--env", "A=B", "--max-attempts", "2",
        "--interruptible", "--org", "o",
    ).submission()  # fmt: skip
    assert set(submission) >= {"name", "machine", "num_machines", "command", "studio", "teamspace", "env", "org"}
    inspect.signature(sdk.Job.run).bind(**submission)
    inspect.signature(sdk.MMT.run).bind(**submission)
    other = planned(SMOLLM, "--machine", "L4_X_4", "--image", "pytorch", "--user", "u", studio=None).submission()
    assert set(other) >= {"image", "user"}
    inspect.signature(sdk.Job.run).bind(**other)
    assert sdk.Machine.from_str(submission["machine"]) == sdk.Machine.L4_X_2


def test_machines_have_the_gpus_that_their_names_say(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = pytest.importorskip("lightning_sdk", reason='not part of the extra "test": pip install -e ".[studio]"')
    machines = {name: machine for name, machine in vars(sdk.Machine).items() if isinstance(machine, sdk.Machine)}
    gpus = {name: machine for name, machine in machines.items() if not name.startswith(("CPU", "DATA_PREP"))}
    assert len(gpus) > 20
    counts = {name: studio_job.accelerators_of(name) for name in gpus}
    assert counts == {name: machine.accelerator_count for name, machine in gpus.items()}
    monkeypatch.setattr(studio_job, "find_spec", lambda name: None)
    assert {name: studio_job.accelerators_of(name) for name in gpus} == counts
    assert studio_job.accelerators_of("p5.48xlarge") is None

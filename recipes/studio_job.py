"""Submit a recipe to Lightning Studios, as a job on one machine or on several.

    python recipes/studio_job.py recipes/smollm_360m.yaml --machine L40S_X_4 --studio my-studio \
        --folder lightning_asyncpp --dry-run
    python recipes/studio_job.py recipes/smollm_360m.yaml --machine L40S_X_4 --num-machines 2 --studio my-studio \
        --folder lightning_asyncpp --teamspace owner/teamspace --trainer.max_steps 1000

Recipe, overrides, machines and devices are checked against each other here, all problems at once, before anything is
submitted; ``--dry-run`` ends there and needs neither the SDK nor a login. To submit, `pip install -e ".[studio]"` and
`lightning login`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

IN_STUDIO = "LIGHTNING_CLOUD_SPACE_ID"  # the SDK's own sign that it runs inside a Studio
OVERRIDES = ("--trainer", "--model", "--data", "--optimizer", "--seed_everything", "--ckpt_path", "--trace", "--config")
_PORT = 29500
_UNITS_AROUND_BLOCKS = 2  # embedding and head


@dataclass
class Plan:
    """What would be submitted, and what is wrong with it."""

    recipe: Path
    machine: str
    num_machines: int
    devices: int | None
    arguments: dict[str, Any]
    """Of ``Job.run``, as the command line gives them: name, studio, image, teamspace, ..."""
    folder: str
    install: str
    overrides: list[str]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def submission(self) -> dict[str, Any]:
        """All arguments of ``lightning_sdk.Job.run``."""
        several = {"num_machines": self.num_machines} if self.num_machines > 1 else {}
        return {**self.arguments, "machine": self.machine, **several, "command": self.command()}

    def command(self) -> str:
        """The shell command that every machine runs."""
        fit = ["fit", "--config", self.recipe.as_posix(), *self.overrides]
        fit += ["--trainer.devices", str(self.devices), "--trainer.num_nodes", str(self.num_machines)]
        start = f"asyncpp {shlex.join(fit)}" if self.num_machines == 1 else self._torchrun(fit)
        here = [f"cd {shlex.quote(self.folder)}"] if self.folder != "." else []
        # Not by importing it, which the folder itself allows where nothing is installed.
        present = f"(command -v asyncpp >/dev/null || {{ {self.install}; }})"
        return " && ".join([*here, present, start])

    def _torchrun(self, fit: Sequence[str]) -> str:
        # Without them every machine would train alone, and say that all is well.
        given = " && ".join(f': "${{{name}:?is not set on this machine}}"' for name in ("MASTER_ADDR", "NODE_RANK"))
        return (
            f"{given} && torchrun --nnodes {self.num_machines} --nproc-per-node {self.devices} "
            f'--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${{MASTER_PORT:-{_PORT}}}" '
            f"-m lightning_asyncpp {shlex.join(fit)}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Check, then submit or, with ``--dry-run``, show what would be submitted."""
    parser = _parser()
    given, rest = parser.parse_known_args(argv)
    plan = make_plan(given, rest)
    if plan.problems:
        print("studio_job: nothing was submitted:", *(f"  - {p}" for p in plan.problems), sep="\n", file=sys.stderr)
        raise SystemExit(2)
    shown = {"call": "lightning_sdk.Job.run", "arguments": plan.submission(), "notes": plan.notes}
    if not given.dry_run:
        shown["link"] = submit(plan.submission())
    print(json.dumps(shown, indent=2) if given.json else table(shown))


def make_plan(given: argparse.Namespace, overrides: Sequence[str]) -> Plan:
    """Bring arguments, recipe and machines together; what does not fit is in ``problems``."""
    plan = Plan(
        recipe=Path(given.recipe),
        machine=machine_name(given.machine),
        num_machines=given.num_machines,
        devices=given.devices,
        arguments=_job_arguments(given),
        folder=given.folder or (os.getcwd() if IN_STUDIO in os.environ and not given.image else "."),
        install=given.install,
        overrides=list(overrides),
    )
    if plan.folder == "." and not given.folder:
        plan.notes.append(f"no --folder: {plan.recipe} must be in the folder that the job starts in")
    plan.problems += argument_problems(given)
    wrong = override_problems(overrides)
    if wrong or not plan.recipe.is_file() or plan.num_machines < 1:
        plan.problems += wrong
        return plan
    config, problems = read_recipe(plan.recipe, overrides)
    plan.problems += problems
    if config is not None:
        _fit_machines(plan, config)
    return plan


def argument_problems(given: argparse.Namespace) -> list[str]:
    """What is wrong with the arguments, without a look at the recipe."""
    problems = []
    if not Path(given.recipe).is_file():
        problems.append(f"{given.recipe}: there is no such file; name a recipe")
    elif PurePath(given.recipe).is_absolute() or ".." in PurePath(given.recipe).parts:
        problems.append(f"{given.recipe}: give it relative to the folder that the machines have too (--folder)")
    for name in ("num_machines", "devices", "max_attempts"):
        value = getattr(given, name)
        if value is not None and value < 1:
            problems.append(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if given.studio and given.image:
        problems.append(f"--studio {given.studio} and --image {given.image}: give one; both are what the job runs in")
    elif not given.studio and not given.image and IN_STUDIO not in os.environ:
        problems.append("--studio or --image is missing: what the job runs in, unless this is called inside a Studio")
    if given.org and given.user:
        problems.append(f"--org {given.org} and --user {given.user}: a teamspace has one owner; give one")
    if "/" in (given.teamspace or "") and (given.org or given.user):
        problems.append(f"--teamspace {given.teamspace} names its owner: leave out --org and --user")
    if given.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", given.name):
        problems.append(f"--name {given.name!r}: letters, digits, '.', '_' and '-' only")
    wrong = [pair for pair in given.env if not re.fullmatch(r"[A-Za-z_]\w*=.*", pair, re.DOTALL)]
    return problems + [f"--env {pair!r}: must be NAME=VALUE" for pair in wrong]


def override_problems(overrides: Sequence[str]) -> list[str]:
    """Which of the further arguments are no overrides of a recipe, but typing errors."""
    names = [argument.partition("=")[0] for argument in overrides if argument.startswith("--")]
    unknown = [name for name in names if re.split(r"[.+]", name)[0] not in OVERRIDES]
    if overrides and not overrides[0].startswith("--"):
        unknown.insert(0, overrides[0])  # of no option
    settled = [name for name in names if name in ("--trainer.devices", "--trainer.num_nodes")]
    return [
        f"{name}: unknown; overrides of the recipe begin with {', '.join(OVERRIDES)}; own options: --help"
        for name in unknown
    ] + [f"{name}: is set from --devices and --num-machines; give those" for name in settled]


def read_recipe(recipe: Path, overrides: Sequence[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """Let the command itself read the recipe with its overrides; return the whole configuration, or the problems."""
    from lightning_asyncpp.lightning_cli.command import read_configuration

    with tempfile.TemporaryFile("w+") as captured:  # a file, since packages that are imported ask for its number
        try:
            with redirect_stderr(captured):
                return read_configuration(["fit", "--config", str(recipe), *overrides]), []
        except SystemExit:
            captured.seek(0)
            lines = [line.strip() for line in captured.read().splitlines() if line.strip()]
        first = next((i for i, line in enumerate(lines) if line.startswith("error:")), 0)
        return None, [f"{recipe} with its overrides: {' '.join(lines[first:]).removeprefix('error:').strip()}"]


def _fit_machines(plan: Plan, config: dict[str, Any]) -> None:
    """Find the devices per machine, and compare them with the machines and with the recipe's stages."""
    trainer = config["trainer"]
    before = trainer["devices"]
    if plan.devices is None and (not isinstance(before, int) or before < 1):
        plan.problems.append(f"trainer.devices={before!r} of the recipe is no number; give --devices")
        return
    if plan.devices is None:
        world = before * (trainer.get("num_nodes") or 1)
        if world % plan.num_machines:
            plan.problems.append(
                f"--num-machines {plan.num_machines}: the recipe's {world} devices cannot be spread evenly over them; "
                "choose another number, or give --devices per machine"
            )
            return
        plan.devices = world // plan.num_machines
    plan.problems += pipeline_problems(config, plan.num_machines * plan.devices)
    problems, notes = machine_problems(plan.machine, plan.devices, str(trainer.get("accelerator", "auto")))
    plan.problems += problems
    plan.notes += notes


def pipeline_problems(config: dict[str, Any], world_size: int) -> list[str]:
    """What is wrong with so many devices for the strategy and the model of a recipe."""
    from lightning_asyncpp.core.settings import PipelineSettings

    strategy = config["trainer"].get("strategy")
    name = strategy if isinstance(strategy, str) else (strategy or {}).get("class_path", "")
    kind = name.rpartition(".")[2]
    delays = {"AsyncPipelineStrategy": 1, "async_pipeline": 1, "SyncPipelineStrategy": 0, "sync_pipeline": 0}
    if kind not in delays:
        return []
    chosen = {} if isinstance(strategy, str) else strategy.get("init_args") or {}
    known = {key: value for key, value in chosen.items() if key in PipelineSettings.__dataclass_fields__}
    settings, problems = PipelineSettings.chosen(**{**known, "delay": delays[kind]}).resolve(world_size)
    layers = ((config["model"].get("init_args") or {}).get("config") or {}).get("num_layers")
    if settings is not None and layers is not None and settings.num_stages > layers + _UNITS_AROUND_BLOCKS:
        problems.append(
            f"{settings.num_stages} stages for {layers} blocks, an embedding and a head; use fewer devices, or "
            "replicas (data_parallel_size)"
        )
    return problems


def machine_problems(machine: str, devices: int, accelerator: str) -> tuple[list[str], list[str]]:
    """What is wrong with so many devices on a machine, and what is worth knowing."""
    on_gpu = accelerator in ("gpu", "cuda", "auto")
    if machine.upper().replace("-", "_").startswith(("CPU", "DATA_PREP")):
        wrong = [f"--machine {machine}: has no GPU, and the recipe has accelerator={accelerator}; choose another"]
        return (wrong if on_gpu and accelerator != "auto" else []), []
    count = accelerators_of(machine)
    if count is None:
        return [], [f"{machine} is none of the machines that the SDK lists: its number of GPUs was not checked"]
    if not on_gpu:
        return [], [f"the recipe has accelerator={accelerator}: the GPUs of {machine} stay idle"]
    if devices > count:
        remedy = "lower --devices, or choose a larger machine or more of them"
        return [f"--machine {machine}: has {count} GPU(s), and {devices} devices are wanted on it; {remedy}"], []
    return [], [f"{count - devices} of {count} GPUs of {machine} stay idle"] if devices < count else []


def machine_name(machine: str) -> str:
    """The SDK's own name of a type (L40S_X_4), whose case it minds; of clouds' types (p5.48xlarge) as it is given."""
    return machine.upper() if re.fullmatch(r"\w+", machine) else machine


def accelerators_of(machine: str) -> int | None:
    """Number of GPUs of a type of machine: as the SDK has it, else by its name; ``None`` if it is not known."""
    if find_spec("lightning_sdk") is not None:
        from lightning_sdk import Machine

        count: int | None = Machine.from_str(machine).accelerator_count
        return count
    found = re.fullmatch(r"[A-Z][A-Z0-9]+(?:_\d+GB|_\d{4}|_SMALL)?(?:_X_(\d+))?", machine)
    return int(found[1] or 1) if found else None


def submit(submission: dict[str, Any]) -> str:
    """Submit, and return the address of the job.

    Raises:
        SystemExit: the SDK is not installed, or refuses; what it says is the message.
    """
    try:
        import lightning_sdk
    except ImportError:
        raise SystemExit(
            'studio_job: submitting needs the SDK: pip install -e ".[studio]", then lightning login'
        ) from None
    run = lightning_sdk.Job.run
    if "num_machines" in submission and "num_machines" not in inspect.signature(run).parameters:
        run = lightning_sdk.MMT.run  # before Job took over
    given = {**submission, "machine": lightning_sdk.Machine.from_str(submission["machine"])}
    try:
        if "teamspace" in given:
            # Resolved here: Job.run compares a text with the bare name of the Studio's, which no owner/name equals.
            owner = {name: given.pop(name) for name in ("org", "user") if name in given}
            given["teamspace"] = lightning_sdk.Teamspace(given["teamspace"], **owner)
        return str(run(**given).link)
    except Exception as error:  # of its own, of HTTP libraries, of Python
        raise SystemExit(f"studio_job: the SDK refused: {type(error).__name__}: {error}") from error


def table(shown: dict[str, Any]) -> str:
    """What is submitted, a line for each argument."""
    rows = [("call", shown["call"]), *shown["arguments"].items()]
    rows += [("note", note) for note in shown["notes"]]
    rows += [("link", shown["link"])] if "link" in shown else []
    return "\n".join(f"{name:<14} {value}" for name, value in rows)


def _job_arguments(given: argparse.Namespace) -> dict[str, Any]:
    optional = {
        "studio": given.studio,
        "image": given.image,
        "teamspace": given.teamspace,
        "org": given.org,
        "user": given.user,
        "env": dict(pair.split("=", 1) for pair in given.env if "=" in pair) or None,
        "max_run_attempts": given.max_attempts,
    }
    name = given.name or f"{re.sub('[^A-Za-z0-9]+', '-', Path(given.recipe).stem)}-{time.strftime('%Y%m%d-%H%M%S')}"
    chosen = {key: value for key, value in optional.items() if value is not None}
    return {"name": name, **chosen, "interruptible": given.interruptible}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Submit a recipe to Lightning Studios; further arguments (--trainer.max_steps 9) override it.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", help="relative to the folder that the machines have too")
    parser.add_argument("--machine", required=True, help="its type, as the SDK names it: L40S_X_4, H100_X_8, CPU")
    parser.add_argument("--num-machines", type=int, default=1, help="how many of them (default: 1)")
    parser.add_argument("--devices", type=int, help="per machine; default: the recipe's, spread over the machines")
    parser.add_argument("--name", help="of the job; default: the recipe's, and the time")
    parser.add_argument("--studio", help="Studio whose environment the job runs in; default: the one this is called in")
    parser.add_argument("--image", help="docker image to run in, instead of a Studio")
    parser.add_argument("--teamspace", help="name, or owner/name; default: the current one")
    parser.add_argument("--org", help="organization that owns the teamspace")
    parser.add_argument("--user", help="user who owns the teamspace")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="may be given several times")
    parser.add_argument("--interruptible", action="store_true", help="cheaper machines, which may be taken away")
    parser.add_argument("--max-attempts", type=int, help="times that a job which failed or was taken away is started")
    parser.add_argument(
        "--folder", help="of this repository on the machines; default: this one in a Studio, else where jobs start"
    )
    parser.add_argument("--install", default="pip install -e .", help="run where the package is missing")
    parser.add_argument("--dry-run", action="store_true", help="show what would be submitted, and submit nothing")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser


if __name__ == "__main__":
    main()

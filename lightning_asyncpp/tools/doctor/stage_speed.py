"""The last part: one stage of a GPT, trained as users train: speed, waits of the host, memory, and Muon's step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from lightning_asyncpp.lightning_cli.command import read_configuration
from lightning_asyncpp.tools.bench.optimizer_contenders import ROUNDING
from lightning_asyncpp.tools.doctor.machine import Machine
from lightning_asyncpp.tools.doctor.stage_recipe import Row, Size, peak_tflops, recipe_of, rows_of, size_of
from lightning_asyncpp.tools.doctor.task import Findings, NoTimeLeftError, Task
from lightning_asyncpp.tools.plan.recipe import build
from lightning_asyncpp.tools.plan.stages import Stages
from lightning_asyncpp.tools.processes import end_of, last_error, run_limited, traced

_ROW_SECONDS, _COMPILED_SECONDS = 75.0, 120.0
_LEAST_SECONDS = 15.0
_TOO_SLOW, _OUT_OF_MEMORY = "no end within", "OutOfMemoryError"
_MIB = 2**20

WAITS_PER_MINI_BATCH = 2
"""How often a stage's host may wait for its GPU, at most."""

MEMORY_TOLERANCE = 0.1
"""How far the plan of memory may be from what torch hands out, relative."""

_LOG_CHARACTERS = 6000


def run(task: Task, findings: Findings) -> None:
    """Run the stage in several ways, each in a process of its own."""
    machine, measured = task.machine, dict[str, dict[str, Any]]()
    size = size_of(machine)
    first, *others = rows_of(machine)
    _measure(task, machine, size, first, measured, findings)
    _compare_memory(task, machine, size, first, measured, findings)
    _compare_muon(task, bool(machine.gpus), findings)
    for row in others:
        if row.is_quick or not task.quick:
            _measure(task, machine, size, row, measured, findings)
        else:
            findings.add(f"one stage, {row.title}", "skipped", "left out by --quick")
    for ours, plain in (("eager", "plain"), ("compiled", "plain-compiled")):
        if ours in measured and plain in measured:
            _compare_loops(ours, measured[ours], measured[plain], bool(machine.gpus), findings)
    if not machine.gpus:
        findings.add("waits of the host", "skipped", "no GPU on this machine that it could wait for")


def _measure(
    task: Task, machine: Machine, size: Size, row: Row, measured: dict[str, dict[str, Any]], findings: Findings
) -> None:
    """Run one way, and say how fast it is."""
    title = f"one stage, {row.title}"
    with findings.checking(title):
        result = task.path / f"stage-{row.name}.json"
        recipe = task.path / f"stage-{row.name}.yaml"
        content = recipe_of(row, size, bool(machine.gpus), result)
        recipe.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
        plain = ["lightning_asyncpp.tools.doctor.stage_training", str(recipe)]
        fit = ["lightning_asyncpp", "fit", "--config", str(recipe)]
        limit = _COMPILED_SECONDS if row.compiled else _ROW_SECONDS
        if error := _run(task, plain if row.plain else fit, row.name, result, limit):
            _say_error(title, error, findings, row.compiled)
            return
        measured[row.name] = json.loads(result.read_text(encoding="utf-8"))
        _say_speed(title, machine, size, measured[row.name], findings)
        if "waits" in measured[row.name] and machine.gpus:
            _say_waits(row, measured[row.name], findings)


def _run(task: Task, module: list[str], name: str, result: Path, limit: float = _ROW_SECONDS) -> str:
    """Run a module of Python that writes ``result``; what went wrong, if anything.

    Raises:
        NoTimeLeftError: the part's time was over.
    """
    log, cache = task.path / f"stage-{name}.log", task.path / "stage-cache"
    seconds, is_cut = task.seconds_for(limit, _LEAST_SECONDS)
    # A compiler that is killed leaves half a file behind, which must not be in the user's own cache.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache)}
    if not task.machine.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # a driver that torch cannot use is in the way otherwise
    ended = run_limited(traced(seconds - 1, *module), log, seconds, environment=environment)
    if ended.code == 0 and result.exists():
        return ""
    print(f"---- {name}\n{end_of(log, _LOG_CHARACTERS)}", flush=True)
    if ended.code is not None:
        return f"exit code {ended.code}: {last_error(log)}"
    shutil.rmtree(cache, ignore_errors=True)
    if is_cut:
        raise NoTimeLeftError
    return f"{_TOO_SLOW} {seconds:.0f} s"


def _say_error(title: str, error: str, findings: Findings, is_compiled: bool = False) -> None:
    """What is too large or too slow for this machine is not wrong; what cannot be compiled can be trained eagerly."""
    is_advice = is_compiled or error.startswith(_TOO_SLOW) or _OUT_OF_MEMORY in error
    findings.add(title, "warning" if is_advice else "failed", error, fix="look at its log, below")


def _say_speed(title: str, machine: Machine, size: Size, found: dict[str, Any], findings: Findings) -> None:
    speed = size.tokens / found["seconds"]
    figures: dict[str, Any] = {"tokens_per_second": round(speed), "ms_per_mini_batch": round(found["seconds"] * 1e3, 2)}
    figures |= {f"{key}_mib": round(found[key] / _MIB) for key in ("allocated", "reserved", "grown") if key in found}
    text = f"{speed:,.0f} tokens/s"
    if machine.gpus and (peak := peak_tflops(machine.gpus[0].name)) is not None:
        figures["mfu"] = round(speed * found["flops_per_token"] / peak / 1e12, 4)
        text += f", MFU {figures['mfu']:.1%} of {peak:g} TFLOP/s (attention counts without causality's half)"
    elif machine.gpus:
        text += f", {speed * found['flops_per_token'] / 1e12:.1f} TFLOP/s (the peak of this GPU is not known here)"
    findings.add(title, "ok", text, figures)


def _say_waits(row: Row, found: dict[str, Any], findings: Findings) -> None:
    title, waits = f"waits of the host, {row.title}", found["waits"]
    text = f"{waits:g} per mini-batch that torch reports"
    if found["places"]:
        text += ": " + ", ".join(f"{place} ({count})" for place, count in list(found["places"].items())[:6])
    if waits > WAITS_PER_MINI_BATCH:
        fix = "each lets the GPU run dry; report the places"
        findings.add(title, "warning", f"{text}; at most {WAITS_PER_MINI_BATCH} were meant", {"waits": waits}, fix)
    else:
        findings.add(title, "ok", text, {"waits": waits})


def _compare_memory(
    task: Task, machine: Machine, size: Size, row: Row, measured: dict[str, dict[str, Any]], findings: Findings
) -> None:
    """What ``asyncpp plan`` says of the same recipe."""
    title = f"memory, planned and real, {row.title}"
    if row.name not in measured:
        findings.add(title, "skipped", "the stage did not run")
        return
    with findings.checking(title):
        planned = _planned(task.path / f"stage-{row.name}.yaml", bool(machine.gpus))
        found = measured[row.name]
        real = found.get("allocated", found.get("grown", 0))
        figures = {"planned_mib": round(planned / _MIB, 1), "real_mib": round(real / _MIB, 1)}
        text = f"{figures['planned_mib']} MiB planned, {figures['real_mib']} MiB taken"
        if not machine.gpus:
            findings.add(title, "ok", f"{text} by the process, with threads and caches, which are not planned", figures)
        elif abs(planned - real) > MEMORY_TOLERANCE * real:
            fix = "give `asyncpp plan` a larger --reserve, and report the figures"
            findings.add(title, "warning", f"{text}: {planned / real - 1:+.0%}", figures, fix)
        else:
            findings.add(title, "ok", f"{text}: {planned / real - 1:+.1%}", figures)


def _planned(recipe: Path, is_gpu: bool) -> int:
    """Bytes of the stage when it needs most."""
    plan = build(read_configuration(["fit", "--config", str(recipe)]))
    settings = plan.settings.resolved(1)
    stages = Stages(plan, settings, on_gpu=is_gpu)
    (memory,) = stages.memory()
    return memory.total


def _compare_muon(task: Task, is_gpu: bool, findings: Findings) -> None:
    """Muon's step and torch's, as ``asyncpp bench optimizer`` compares them."""
    title = "Muon's step, beside torch.optim.Muon's"
    with findings.checking(title):
        result = task.path / "stage-muon.json"
        sizes = "--vocab 0 --repeats 7 --device cuda" if is_gpu else (
            "--vocab 0 --repeats 3 --layers 1 --width 128 --heads 4 --kv-heads 2 --mlp 384 --context 16"
        )  # fmt: skip
        options = ["--systems", "ours", "torch", "--error-feedback", "false", "--json", str(result)]
        command = ["lightning_asyncpp", "bench", "optimizer", *sizes.split(), *options]
        if error := _run(task, command, "muon", result):
            _say_error(title, error, findings)
            return
        systems = json.loads(result.read_text(encoding="utf-8"))["systems"]
        ours, reference = systems["ours"], systems["torch"]
        speed, difference = ours["speed_over_torch"]["median"], ours["difference"]
        figures = {f"{name}_ms": round(one["milliseconds"]["median"], 3) for name, one in (
            ("ours", ours), ("torch", reference))}  # fmt: skip
        figures |= {"speed_over_torch": round(speed, 3), "difference": difference["relative"]}
        text = f"{figures['ours_ms']:g} ms and {figures['torch_ms']:g} ms (ours is {speed:.2f} times as fast)"
        if difference["relative"] > ROUNDING:
            text += f"; their steps differ by {difference['relative']:.1%}, more than roundings of bf16"
            # How much they come to was found on CPUs.
            findings.add(title, "warning" if is_gpu else "failed", text, figures, "report it with this file")
        else:
            findings.add(title, "ok", text, figures)


def _compare_loops(name: str, ours: dict[str, Any], plain: dict[str, Any], is_gpu: bool, findings: Findings) -> None:
    ratio = plain["seconds"] / ours["seconds"]
    text = f"{ratio:.2f} times as fast as a plain loop of torch"
    text += "" if is_gpu else " (small, and measured apart: on CPUs not worth much)"
    fix = "look at the waits of the host; report it with this file"
    is_slow = is_gpu and ratio < 0.95
    findings.add(
        f"one stage beside a plain loop, {name}", "warning" if is_slow else "ok", text, {"ratio": round(ratio, 4)},
        fix if is_slow else "",
    )  # fmt: skip

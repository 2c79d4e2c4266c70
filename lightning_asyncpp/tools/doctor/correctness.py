"""The second part: do pipelines train what a single process trains, on the route that tensors would take here?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.tools.doctor.case_ranks import SEVERAL_PER_GPU_SINCE, launch
from lightning_asyncpp.tools.doctor.cases import CASES, REPLICATED, Case, Place
from lightning_asyncpp.tools.doctor.machine import Machine
from lightning_asyncpp.tools.doctor.task import Findings, NoTimeLeftError, Status, Task

_METRIC, _METRIC_TOLERANCE = "val_loss", 1e-3
"""Relative: a pipeline takes a mean over micro-batches, and on GPUs weights are equal to rounding."""


def run(task: Task, findings: Findings) -> None:
    """Compare every place with the emulator of the delay in one process."""
    places, not_here = places_of(task.machine)
    for title, why in not_here.items():
        findings.add(title, "skipped", why)
    alone: dict[Place, dict[str, dict[str, Any]]] = {}
    for index, place in enumerate(places):
        title = title_of(place)
        if task.quick and place.replicas > 1:
            findings.add(title, "skipped", "left out by --quick")
            continue
        with findings.checking(title):
            reference = Place("shared" if place.is_gpu else "cpu", place.stages, place.replicas, alone=True)
            if reference not in alone:
                alone[reference] = _trained_alone(task, reference, f"alone-{index}")
            compare(task, place, alone[reference], findings, f"place-{index}")


def places_of(machine: Machine) -> tuple[list[Place], dict[str, str]]:
    """Where pipelines are tried on a machine, and what cannot be tried there: title -> why not."""
    count = len(machine.gpus)
    if not count:
        absent = "no GPU on this machine"
        not_here = {"over NCCL": absent, "several stages on one GPU": absent}
        return [Place("cpu", 2), Place("cpu", 3), Place("cpu", 2, 2)], not_here
    places, not_here = [], {}
    for stages, replicas in ((2, 1), (3, 1), (2, 2)):
        place = Place("nccl", stages, replicas)
        if count >= place.ranks:
            places.append(place)
        else:
            not_here[title_of(place)] = f"it takes {place.ranks} GPUs, and there is {count}"
            places.append(Place("shared", stages, replicas))
    if machine.nccl is not None and machine.nccl >= SEVERAL_PER_GPU_SINCE and not machine.hip:
        places += [Place("nccl on one GPU", 2), Place("nccl on one GPU", 3)]
    else:
        title = title_of(Place("nccl on one GPU", 3))
        not_here[title] = "NCCL takes several ranks per GPU since 2.30; here it is another one"
    if machine.is_exclusive:
        why = "the GPUs take one process each (EXCLUSIVE_PROCESS; `nvidia-smi -c DEFAULT` would change it)"
        not_here |= {title_of(place): why for place in places if place.route != "nccl"}
        places = [place for place in places if place.route == "nccl"]
    return places, not_here


def title_of(place: Place) -> str:
    """What a place is called."""
    how = {
        "cpu": "on CPUs, over gloo and sockets", "shared": "on one GPU, through the host",
        "nccl": "a GPU for each, over NCCL", "nccl on one GPU": "on one GPU, over NCCL",
    }[place.route]  # fmt: skip
    replicas = f" x {place.replicas} replicas" if place.replicas > 1 else ""
    return f"{place.stages} stages{replicas} {how}"


def compare(task: Task, place: Place, expected: Mapping[str, dict[str, Any]], findings: Findings, folder: str) -> None:
    """Train all cases at a place, and compare."""
    names = _cases_of(place)
    is_experiment = place.route == "nccl on one GPU"
    ran = launch(task, place, names, folder, 60 if is_experiment else 90)
    is_exact = not place.is_gpu and place.replicas == 1
    for name in names:
        title = f"{title_of(place)}: {CASES[name].title}"
        if (outcome := ran.outcomes.get(name)) is not None:
            findings.add(title, *judged(CASES[name], outcome, expected[name], is_exact))
    if ran.ran_out:
        raise NoTimeLeftError
    if ran.error:
        left = [name for name in names if name not in ran.outcomes]
        text = f"stopped at {left[0]!r}: {ran.error}" if left else ran.error
        if is_experiment:
            text += "; nobody trains so, it only stands for NCCL between GPUs: several processes share one GPU by turns"
            findings.add(title_of(place), "warning", text, fix="look at it on two GPUs")
        else:
            findings.add(title_of(place), "failed", text, fix=_fix_of(place))
    elif "layers" in ran.outcomes and "flushed" in ran.outcomes:
        _check_that_delay_shows(place, ran.outcomes, expected["layers"]["start"], findings)


def _cases_of(place: Place) -> list[str]:
    return list(CASES) if place.replicas == 1 else list(REPLICATED)


def _trained_alone(task: Task, place: Place, folder: str) -> dict[str, dict[str, Any]]:
    """What one process makes of the cases.

    Raises:
        NoTimeLeftError: the part's time was over.
        RuntimeError: it failed.
    """
    ran = launch(task, place, _cases_of(place), folder, 120 if place.replicas == 1 else 90)
    if ran.ran_out:
        raise NoTimeLeftError
    if ran.error:
        raise RuntimeError(f"the single process that it is compared with failed: {ran.error}")
    return ran.outcomes


def _check_that_delay_shows(
    place: Place, outcomes: Mapping[str, dict[str, Any]], start: Mapping[str, Tensor], findings: Findings
) -> None:
    """A comparison that could not tell a run without delay from one with it would say nothing."""
    layers, flushed = outcomes["layers"], outcomes["flushed"]
    difference, _ = largest_difference(layers["weights"], flushed["weights"], start)
    figures = {"difference": difference}
    title = f"{title_of(place)}: with and without delay"
    if difference > 10 * CASES["layers"].tolerance:
        findings.add(title, "ok", f"differ by {difference:.2g} times the largest change, as they must", figures)
    else:
        findings.add(title, "failed", "are the same: the delay is not there", figures, "report it with this file")


def _fix_of(place: Place) -> str:
    """What to try where a pipeline did not come to its end."""
    if place.route == "nccl":
        return (
            "run it again with NCCL_DEBUG=INFO; a stack of each rank is in the log below; see"
            " https://lightning-asyncpp.github.io/lightning-asyncpp/research/gpus/"
        )
    return "a stack of each rank is in the log below; report it with this file"


def judged(
    case: Case, outcome: Mapping[str, Any], expected: Mapping[str, Any], is_exact: bool
) -> tuple[Status, str, dict[str, Any], str]:
    """Status, text, figures and fix of one comparison."""
    tolerance = 0.0 if is_exact else case.tolerance
    difference, where = largest_difference(outcome["weights"], expected["weights"], expected["start"])
    figures: dict[str, Any] = {"difference": difference, "tolerance": tolerance}
    figures["seconds"] = round(outcome["seconds"], 2)
    metric, alone = outcome["metrics"].get(_METRIC), expected["metrics"].get(_METRIC)
    if alone is not None:
        figures |= {_METRIC: metric, f"{_METRIC} of one process": alone}
    if not difference <= tolerance:
        text = (
            f"trains something else: {where} differs by {difference:.2g} of its largest change (allowed: {tolerance:g})"
        )
        return "failed", text, figures, "do not train so; report it with this file"
    if alone is not None and (metric is None or not abs(metric - alone) <= _METRIC_TOLERANCE * abs(alone)):
        return "failed", f"{_METRIC} is {metric}, and in one process {alone}", figures, "report it with this file"
    saved, where = largest_difference(outcome["saved"], expected["saved"], _nothing(expected["saved"]))
    if not saved <= tolerance or bool(expected["saved"]) != case.saves:
        text = f"its checkpoint holds something else: {where or 'all'} differs by {saved:.2g} of its largest value"
        return "failed", text, figures, "do not resume from such checkpoints; report it with this file"
    text = "equal to the last bit" if not difference else f"equal to rounding: {difference:.1g} of the largest change"
    return "ok", f"{text} ({_route(outcome['route'])})", figures, ""


def largest_difference(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], start: Mapping[str, Tensor]
) -> tuple[float, str]:
    """Of all weights, as a share of the largest change in the tensor, and in which; infinite where one is missing."""
    if sorted(found) != sorted(expected):
        return float("inf"), str(sorted(set(found) ^ set(expected))[0])
    worst, where = 0.0, next(iter(expected), "")
    for name, value in expected.items():
        difference = (found[name].double() - value.double()).abs().max().item()
        if not difference:
            continue
        change = (value.double() - start[name].double()).abs().max().item()
        share = difference / change if change else float("inf")
        if not share <= worst:  # also where it is NaN
            worst, where = share, name
    return worst, where


def _nothing(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in tensors.items()}


def _route(described: str) -> str:
    """How tensors travelled, of what a strategy says of its pipeline."""
    return described.rpartition("; ")[2] or "no messages"

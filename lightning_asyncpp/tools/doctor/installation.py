"""The first part: does the installation fit the machine?"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_asyncpp.tools.doctor.environment import problems
from lightning_asyncpp.tools.doctor.findings import Finding, Findings
from lightning_asyncpp.tools.doctor.machine import Machine, examined_host, used_interface, with_gpus_examined
from lightning_asyncpp.tools.doctor.task import Task

SMALL_SHM_GIB = 0.25
"""Containers have 64 MiB of /dev/shm unless told otherwise, which workers of loaders and NCCL fill quickly."""

KERNEL_SHARED_KIB = 96
"""What a block of the Triton kernel for Muon's products takes, see optim/symmetric_triton.py."""


def run(task: Task, findings: Findings) -> None:
    """Look at the machine, leave it for the other parts, and say what is wrong with it."""
    machine = examined_host()
    machine.save(task.machine_file)  # the driver may hang
    machine = with_gpus_examined(machine)
    machine.save(task.machine_file)
    for finding in judged(machine):
        findings.add(**vars(finding))


def judged(machine: Machine) -> Iterator[Finding]:
    """What there is to say of a machine."""
    yield from _versions(machine)
    yield from _gpus(machine)
    yield from _peer_access(machine)
    yield from _network(machine)
    yield from _environment(machine)
    yield from _shared_memory(machine)
    for name, error in machine.errors.items():
        yield Finding(f"reading {name}", "failed", error, fix="run the same in Python, and mend what it says")


def _versions(machine: Machine) -> Iterator[Finding]:
    figures = {"python": machine.python, **machine.packages, "CUDA of torch": machine.cuda or "none"}
    figures |= {"driver": machine.driver or "none", "NCCL": _dotted(machine.nccl)}
    if machine.driver and not machine.gpus:
        fix = "`nvidia-smi` must list them; then install a torch for CUDA that this driver knows (https://pytorch.org)"
        hidden = machine.environment.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and hidden.strip() in ("", "-1"):
            yield Finding("versions", "warning", f"CUDA_VISIBLE_DEVICES={hidden!r} hides all GPUs", figures, "unset it")
            return
        text = (
            f"there is an NVIDIA driver, {machine.driver}, but torch sees no GPU (its CUDA: {machine.cuda or 'none'})"
        )
        yield Finding("versions", "failed", text, figures, fix)
    elif machine.gpus and machine.nccl is None:
        fix = "install a torch that was built with NCCL; meanwhile process_group_backend='gloo' goes through the host"
        yield Finding("versions", "failed", "torch has no NCCL, over which GPUs talk", figures, fix)
    else:
        yield Finding("versions", "ok", ", ".join(f"{name} {value}" for name, value in figures.items()), figures)
    if machine.hip:
        yield Finding("AMD", "warning", "of AMD's GPUs nothing is known", fix="report it with this file")
    slower = "torch.compile cannot be used, and Muon multiplies whole symmetric matrices"
    if machine.gpus and "triton" not in machine.packages:
        fix = "pip install triton, in the version that torch asks for"
        yield Finding("triton", "warning", f"there is no triton: {slower}", fix=fix)
    elif machine.gpus and not machine.runs_triton:
        lacking = "C compiler" if not machine.c_compiler else "Python.h"
        text = f"there is no {lacking}, without which Triton cannot launch a kernel: {slower}"
        fix = "apt install gcc python3-dev, or what your system calls them"
        yield Finding("triton", "warning", text, fix=fix)
    if not machine.compiler:
        text = "there is no C++ compiler, without which torch.compile may fail"
        yield Finding("compiler", "warning", text, fix="install g++")


def _gpus(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus:
        yield Finding("GPUs", "skipped", "no GPU on this machine: what follows was done on CPUs, over gloo")
        return
    for index, gpu in enumerate(machine.gpus):
        capability = ".".join(map(str, gpu.capability))
        text = (
            f"{gpu.name}, {gpu.memory_gib:.1f} GiB ({gpu.free_gib:.1f} free), {gpu.sms} SMs, compute capability"
            f" {capability}, {gpu.shared_memory_kib} KiB of shared memory per block"
        )
        figures = {"name": gpu.name, "memory_gib": round(gpu.memory_gib, 2), "free_gib": round(gpu.free_gib, 2)}
        figures |= {"sms": gpu.sms, "capability": capability, "shared_memory_kib": gpu.shared_memory_kib}
        wrong = fix = ""
        if gpu.free_gib < 0.9 * gpu.memory_gib:
            wrong, fix = "somebody else uses its memory", "`nvidia-smi` shows who; times and memory below include them"
        elif gpu.capability < (8, 0):
            wrong, fix = "it is older than Ampere and computes slowly in bf16", "use precision='32-true'"
        elif 0 < gpu.shared_memory_kib < KERNEL_SHARED_KIB:
            wrong, fix = "too little shared memory for Muon's Triton kernel", "nothing: it falls back, and is slower"
        yield Finding(f"GPU {index}", "warning" if wrong else "ok", f"{text}: {wrong}" if wrong else text, figures, fix)
    if len({gpu.name for gpu in machine.gpus}) > 1:
        fix = "set CUDA_VISIBLE_DEVICES to those that are alike, or give partition= as many layers as each can do"
        text = "GPUs are not alike, and the slowest stage sets the pace"
        yield Finding("different GPUs", "warning", text, fix=fix)


def _peer_access(machine: Machine) -> Iterator[Finding]:
    if len(machine.gpus) < 2:
        return
    apart = [f"{i}-{j}" for i, row in enumerate(machine.peer_access) for j, reaches in enumerate(row) if not reaches]
    figures = {"topology": machine.topology} if machine.topology else {}
    if not machine.topology:
        yield Finding("topology", "skipped", "`nvidia-smi topo -m` says nothing here")
    if apart:
        text = f"GPUs do not reach each other's memory: {', '.join(apart)}; their messages go through the host's"
        fix = "make neighbours of GPUs that do (the order of CUDA_VISIBLE_DEVICES), or expect slower messages"
        yield Finding("peer access", "warning", text, figures, fix)
    else:
        yield Finding("peer access", "ok", "all GPUs reach each other's memory", figures)


def _network(machine: Machine) -> Iterator[Finding]:
    used = used_interface(machine)
    listed = ", ".join(name if has else f"{name} (no IPv4 address)" for name, has in machine.interfaces.items())
    text = f"a run on this machine alone uses {used}; there are {listed or 'none'}"
    figures = {"used": used, "interfaces": listed}
    unfit = [] if used == "any" else [name for name in used.split(",") if not machine.interfaces.get(name)]
    if unfit:
        fix = "set GLOO_SOCKET_IFNAME to one that has an address, or unset it"
        yield Finding(
            "network", "failed", f"GLOO_SOCKET_IFNAME={used}: no usable {', '.join(unfit)}; {text}", figures, fix
        )
    else:
        yield Finding("network", "ok", text, figures)


def _environment(machine: Machine) -> Iterator[Finding]:
    found = problems(machine.environment)
    for assignment, effect, fix in found:
        yield Finding("environment", "warning", f"{assignment}: {effect}", fix=fix)
    if not found:
        shown = ", ".join(f"{name}={value}" for name, value in machine.environment.items())
        yield Finding("environment", "ok", shown or "no variable of CUDA, NCCL, gloo or torch's allocator is set")


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    if machine.shm_gib is None:
        yield Finding("/dev/shm", "warning", "there is none: loaders with workers, and NCCL, need it")
        return
    figures = {"free_gib": round(machine.shm_gib, 3)}
    text = f"{machine.shm_gib:.2f} GiB free"
    if machine.shm_gib < SMALL_SHM_GIB:
        fix = "in a container: --shm-size=8g, or --ipc=host"
        yield Finding("/dev/shm", "warning", f"{text}: little for loaders with workers, and for NCCL", figures, fix)
    else:
        yield Finding("/dev/shm", "ok", text, figures)


def _dotted(version: tuple[int, ...] | None) -> str:
    return "none" if version is None else ".".join(map(str, version))

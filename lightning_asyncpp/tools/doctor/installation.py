"""The first part: does the installation fit the machine?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from lightning_asyncpp.tools.doctor.machine import Machine, examined_host, used_interface, with_gpus_examined
from lightning_asyncpp.tools.doctor.task import Finding, Findings, Task

_OFF = ("", "0", "false", "off", "no", "n")


@dataclass(frozen=True)
class Variable:
    """One variable.

    Attributes:
        name: of it.
        is_problem: value -> whether it is one.
        effect: what such a value does.
        fix: what to do.
    """

    name: str
    is_problem: Callable[[str], bool]
    effect: str
    fix: str


def _is_on(value: str) -> bool:
    return value.strip().lower() not in _OFF


def _is_zero(value: str) -> bool:
    return value.strip() == "0"


def _few(value: str) -> bool:
    return value.strip().isdigit() and int(value) < 4


VARIABLES = (
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS", _few,
        "all streams of a GPU share so few hardware queues: a message that waits for its peer holds up what is computed"
        " behind it, so nothing overlaps. Scripts made for Megatron's tensor parallelism set it to 1",
        "unset it, or set it to 8 (the default) or more, up to 32",
    ),
    Variable(
        "CUDA_LAUNCH_BLOCKING", _is_on,
        "the host waits for every kernel: nothing overlaps, and speed means nothing; it is for debugging", "unset it",
    ),
    Variable(
        "TORCH_NCCL_BLOCKING_WAIT", _is_on,
        "the host waits for every message: stages no longer run ahead of each other", "unset it",
    ),
    Variable(
        "NCCL_BLOCKING_WAIT", _is_on,
        "the host waits for every message: stages no longer run ahead of each other", "unset it",
    ),
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", _is_zero,
        "nobody ends a rank whose message never comes: a lost peer may leave the others waiting", "unset it",
    ),
    Variable("NCCL_P2P_DISABLE", _is_on, "messages between GPUs of this machine go through its memory", "unset it"),
    Variable(
        "NCCL_SHM_DISABLE", _is_on, "where GPUs do not reach each other, messages go through the network", "unset it"
    ),
    Variable("NCCL_IB_DISABLE", _is_on, "messages between machines go over TCP instead of InfiniBand", "unset it"),
    Variable(
        "NCCL_DEBUG", lambda value: value.strip().upper() in ("INFO", "TRACE"),
        "NCCL writes much, TRACE for every call", "unset it, or set it to WARN, once NCCL works",
    ),
    Variable(
        "PYTORCH_NO_CUDA_MEMORY_CACHING", _is_on,
        "every tensor is asked of the driver and given back, for which the whole device is waited", "unset it",
    ),
    Variable(
        "OMP_NUM_THREADS", lambda value: value.strip().isdigit() and int(value) > 16,
        "every rank of a machine starts as many threads on its CPUs", "set it to the cores divided by the ranks",
    ),
)  # fmt: skip


def problems(environment: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Variables whose values are a problem: (assignment, effect, fix)."""
    found = []
    for variable in VARIABLES:
        value = environment.get(variable.name)
        if value is not None and variable.is_problem(value):
            found.append((f"{variable.name}={value}", variable.effect, variable.fix))
    return found


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

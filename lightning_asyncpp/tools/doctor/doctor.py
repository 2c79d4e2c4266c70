"""``asyncpp doctor``: what is installed here, and does a pipeline train what it should? The report fits a screen."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from lightning_asyncpp.private_names import installed_versions
from lightning_asyncpp.tools.doctor.trial import UPDATES, Found
from lightning_asyncpp.tools.parsers import doctor_parser

PACKAGES = ("lightning-asyncpp", "torch", "lightning", "torchmetrics", "litdata", "triton")
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_", "PYTORCH_", "OMP_")
"""Environment variables that a report shows begin so."""
_LOG_LINES = 25
_TRIAL = "lightning_asyncpp.tools.doctor.trial"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the report; a training that fails or differs ends with code 1."""
    limit = doctor_parser().parse_args(argv).timeout
    for name, value in [*_versions(), *_devices(), *_environment()]:
        _say(name, value)
    print(f"two stages train for a few updates, which takes {limit} s at most", file=sys.stderr)
    found, log = run_trial(limit)
    if found is None:
        _say("training", f"FAILED, or did not end within {limit} s; the end of its log:\n")
        print("\n".join(log.splitlines()[-_LOG_LINES:]))
        raise SystemExit(1)
    _say("training", f"2 stages, {UPDATES} updates in {found.seconds:.1f} s; {found.route}, over {found.backend}")
    share = f"{found.difference:.1g} of the largest change"
    if not found.is_equal:
        _say("result", f"WRONG: differs from the reference by {share}; do not train so, and report it with this text")
        raise SystemExit(1)
    _say("result", f"equal to the reference {f'to rounding, {share}' if found.difference else 'to the last bit'}")


def run_trial(limit: float) -> tuple[Found | None, str]:
    """Run the trial in processes of its own, which may hang; return what it found, if it did, and its log."""
    with tempfile.TemporaryDirectory(prefix="asyncpp-doctor-") as folder:
        result, log = Path(folder) / "found.json", Path(folder) / "log"
        command = [sys.executable, "-X", "faulthandler", "-m", _TRIAL, str(result)]
        with log.open("wb") as output:
            trial = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = trial.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
                _signal(trial, signal.SIGABRT)  # each rank writes where its threads are
            finally:
                _signal(trial, signal.SIGKILL)
                trial.wait()
        found = Found(**json.loads(result.read_text())) if code == 0 else None
        return found, log.read_text(errors="replace")


def _signal(trial: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(trial.pid, number)
        if number is signal.SIGABRT:
            trial.wait(5)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass


def _versions() -> Iterator[tuple[str, str]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "system", f"{platform.platform()}, Python {platform.python_version()}, {cores} cores"
    yield "packages", ", ".join(f"{name} {version}" for name, version in installed_versions(PACKAGES).items())
    cuda, hip = torch.version.cuda, torch.version.hip
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and torch.distributed.is_nccl_available() else ()
    driver = Path("/proc/driver/nvidia/version")
    yield "CUDA", ", ".join([
        f"built for {f'CUDA {cuda}' if cuda else f'ROCm {hip}' if hip else 'CPUs'}",
        f"NCCL {'.'.join(map(str, nccl[:3]))}" if nccl else "no NCCL",
        next((line for line in driver.read_text().splitlines() if line), "") if driver.exists() else "no NVIDIA driver",
    ])  # fmt: skip


def _devices() -> Iterator[tuple[str, str]]:
    count = torch.cuda.device_count()
    if not count:
        yield "GPUs", "none: two processes train on the CPU"
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        peers = [other for other in range(count) if other != index and torch.cuda.can_device_access_peer(index, other)]
        reaches = f"; reaches the memory of {', '.join(map(str, peers)) or 'no other'}" if count > 1 else ""
        yield f"GPU {index}", f"{properties.name}, {free:.0f} of {total:.0f} GiB free{reaches}"


def _environment() -> Iterator[tuple[str, str]]:
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)]
    yield "variables", " ".join(found) or f"none that begin with {', '.join(PREFIXES)}"


def _say(name: str, value: str) -> None:
    print(f"{name:<10} {value}", flush=True)


if __name__ == "__main__":
    main()

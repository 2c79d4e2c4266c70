"""What ``asyncpp doctor`` finds out about a machine, where drivers count otherwise, fail or hang."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_asyncpp.tools.doctor import installation, machine
from lightning_asyncpp.tools.doctor.installation import judged
from lightning_asyncpp.tools.doctor.machine import Machine, examined_host, with_gpus_examined
from lightning_asyncpp.tools.doctor.task import Task
from tests.tools.doctor_machines import CPUS, with_gpus


class FakeCuda:
    """A host with GPUs of which this process sees one instance of MIG: NVML counts them until CUDA is initialized."""

    is_initialized = False

    def init(self) -> None:
        self.is_initialized = True

    def device_count(self) -> int:
        return 1 if self.is_initialized else 8

    def get_device_properties(self, index: int) -> SimpleNamespace:
        if index:
            raise AssertionError("Invalid device id")
        return SimpleNamespace(
            name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", multi_processor_count=14, major=8, minor=0,
            shared_memory_per_block_optin=166912,
        )  # fmt: skip

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 4 * 2**30, 5 * 2**30


def test_an_instance_of_mig_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", FakeCuda())
    (gpu,) = machine._gpus()
    assert "MIG" in gpu.name
    assert gpu.memory_gib == 5


@pytest.mark.parametrize(("code", "said"), [(23007, (2, 30, 7)), (2708, (2, 28, 9)), (None, (2, 28, 9))])
def test_the_nccl_that_is_loaded_is_named(code: int | None, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.9 it counted otherwise; one that is not loaded, as within torch, leaves torch's word."""

    def library(name: str, mode: int) -> SimpleNamespace:
        if code is None or not mode & os.RTLD_NOLOAD:
            raise OSError(name)
        return SimpleNamespace(ncclGetVersion=lambda pointer: setattr(pointer._obj, "value", code))

    monkeypatch.setattr(machine.ctypes, "CDLL", library)
    cuda = SimpleNamespace(is_available=lambda: True, nccl=SimpleNamespace(version=lambda: (2, 28, 9)))
    given = SimpleNamespace(cuda=cuda, distributed=SimpleNamespace(is_nccl_available=lambda: True))
    monkeypatch.setattr(machine, "_torch", lambda: given)
    assert machine._nccl() == said


def test_versions_are_kept_where_the_driver_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(BaseException):
        pass

    def gpus() -> None:
        raise Hangs

    monkeypatch.setattr(machine, "_gpus", gpus)
    given = Task("installation", "", str(tmp_path), False, time.time() + 60)
    with pytest.raises(Hangs):
        installation.run(given, given.findings)
    assert given.machine.packages["torch"]
    assert not given.machine.is_complete


def test_what_raises_is_named_and_the_rest_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(machine, "_gpus", broken)
    found = with_gpus_examined(examined_host())
    assert found.errors == {"gpus": "RuntimeError: driver too old"}
    assert found.packages["torch"]
    assert found.is_complete


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_what_nvidia_smi_says_is_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "if [ $1 = topo ]; then printf '\\033[4mGPU0\\033[0m NV18\\n'; else printf 'Default\\nExclusive_Process\\n'; fi"
    )
    nvidia_smi(tmp_path, monkeypatch, script)
    assert machine._topology() == "GPU0 NV18"
    assert machine._is_exclusive()


def test_without_an_answer_of_nvidia_smi_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "echo no driver; exit 9")
    assert machine._topology() == ""
    assert not machine._is_exclusive()
    said = {finding.title: finding.status for finding in judged(with_gpus(2, topology=""))}
    assert said["topology"] == "skipped"


def test_values_that_name_machines_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_COMM_ID", "other-node:1234")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning does
    found = machine._environment()
    assert found["NCCL_COMM_ID"] == "(not shown)"
    assert found["NCCL_ALGO"] == "Ring"
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in found


def test_a_compiler_is_looked_for_as_triton_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert machine._c_compiler() == ""
    (tmp_path / "clang").write_text("")
    (tmp_path / "clang").chmod(0o755)
    assert machine._c_compiler() == str(tmp_path / "clang")
    monkeypatch.setenv("CC", "cc-that-is-not-there")
    assert machine._c_compiler() == ""


@pytest.mark.parametrize(
    ("changes", "runs"), [({}, True), ({"c_compiler": ""}, False), ({"has_headers": False}, False)]
)
def test_triton_takes_a_compiler_and_headers(changes: dict[str, object], runs: bool) -> None:
    assert with_gpus(1, **changes).runs_triton == runs
    assert not CPUS.runs_triton
    assert not Machine().runs_triton

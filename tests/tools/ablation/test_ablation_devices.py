"""What the trainings run on: cores, GPUs, and versions that should not be mixed."""

from __future__ import annotations

import os

import pytest
import torch

from lightning_asyncpp.tools.ablation.run.conditions import (
    device_name,
    gpu_problems,
    mixture,
    name_of,
    slots,
    usable_cores,
    versions,
)


@pytest.fixture(autouse=True)
def all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def gpus_of(environments: list[dict[str, str]]) -> list[str]:
    return [environment["CUDA_VISIBLE_DEVICES"] for environment in environments]


def test_slots_share_cores_and_gpus() -> None:
    assert len(slots(None, 4, [], cores=lambda: 10)) == 2
    assert len(slots(None, 4, [], cores=lambda: 2)) == 1
    assert gpus_of(slots(None, 2, ["0", "1", "1"])) == ["0", "1", "1"]
    assert slots(1, 2, [])[0] == {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}


def test_gpus_are_counted_among_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-8932f937")
    assert gpus_of(slots(None, 1, ["0", "1", "0", "GPU-8932f937"])) == ["2", "GPU-8932f937", "2", "GPU-8932f937"]


def test_gpus_that_are_not_there_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert list(gpu_problems(["0"])) == ["--gpus=0: torch finds no GPU here"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert list(gpu_problems(["0", "1", "GPU-8932f937"])) == []
    assert list(gpu_problems(["0", "2"])) == ["--gpus=0,2: there are 2 GPUs, counted from 0, and no 2"]
    (problem,) = gpu_problems(["cuda:0", "-1"])
    assert problem.startswith("--gpus=cuda:0,-1: cuda:0, -1 is no GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert list(gpu_problems(["2"])) == [
        "--gpus=2: there are 2 GPUs in CUDA_VISIBLE_DEVICES=2,3, counted from 0, and no 2"
    ]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity to set")
def test_only_cores_that_this_process_may_use_are_counted() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert usable_cores() == len(before)


def test_the_name_of_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["H100", "H100", "A100"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: names[d if isinstance(d, int) else d.index])
    assert name_of([]) == device_name(torch.device("cpu")) == "cpu"
    assert name_of(["0", "1"]) == device_name(torch.device("cuda", 1)) == "H100"
    assert name_of(["0", "2"]) is None
    assert name_of(["GPU-8932f937"]) is None
    assert versions(None, 3).keys() == versions("cpu", 3).keys() - {"device"}


def test_runs_that_were_made_alike_are_no_mixture() -> None:
    now = versions("cpu", 1)
    old = {"torch": now["torch"]}  # of a time when less was kept
    for finished in ([], [{}], [old], [now, old], [now] * 3):
        assert mixture(finished, now) is None
    assert mixture([now, now], {}) is None


def test_a_mixture_names_versions_and_devices_and_how_many_runs_have_each() -> None:
    now = {"torch": "2.15.0", "lightning": "2.6.6", "device": "cpu", "threads": "1"}
    gpu = now | {"device": "NVIDIA H100"}
    told = mixture([now, gpu, gpu, {}], {})
    assert told is not None
    assert "alike: device NVIDIA H100 (2 runs), cpu (1 run)." in told
    assert "--output" in told
    told = mixture([now, gpu], now | {"torch": "2.16.0"})
    assert told is not None
    assert "torch 2.15.0 (2 runs), now 2.16.0; device NVIDIA H100 (1 run), cpu (1 run), now cpu." in told
    assert "threads" not in told
    assert mixture([{"threads": "1"}], {"threads": "2", "torch": "2.15.0"}) is not None

"""The report of ``asyncpp doctor`` as something to paste: nobody's names and addresses, and not too long."""

from __future__ import annotations

import getpass
import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_asyncpp.tools.doctor.doctor_report import Scrubber, as_json, as_markdown
from lightning_asyncpp.tools.doctor.parts import PARTS, Result, shortened
from lightning_asyncpp.tools.doctor.task import Finding
from tests.tools.doctor_machines import CPUS, with_gpus

SECRETS = ("node17", "alice", "10.1.2.3", "fe80::1", "2001:db8::7", "00:1a:2b:3c:4d:5e")
LOG = (
    "node17:4242:4250 [0] NCCL INFO Bootstrap : Using eth0:10.1.2.3<0> ... fe80::1%ib0<0>, [2001:db8::7]:80\n"
    "NODE17.cluster.example 00:1a:2b:3c:4d:5e no route to fe80::1: giving up; alice@node17\n"
    'File "/home/alice/run/train.py", line 3, in c10::Error at::add std::string\n'
    "/scratch/alice/x /tmp/torchinductor_alice/y at 12:34:56,789 test.py::test_it 0000:3b:00.0 NCCL 2.29.7\n"
    "listening on 127.0.0.1:29500 and ::1\n"
)


@pytest.fixture(autouse=True)
def a_machine_with_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.cluster.example")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/alice"))


def test_no_report_says_whose_machine_it_is() -> None:
    message = "GLOO_SOCKET_IFNAME=ib7: node17.cluster.example has no network interface 'ib7'"
    machine = with_gpus(1, environment={"CUDA_PATH": "/home/alice/cuda"}, errors={"nccl": "on node17: 10.1.2.3"})
    results = [
        Result(PARTS[0], [Finding("2 stages", "failed", message, {"address": "fe80::1"}, "see node17")], 1.0, LOG)
    ]
    as_text = json.dumps(as_json(results, machine, False))
    for text in (as_text, as_markdown(results, machine, False)):
        assert not [secret for secret in SECRETS if secret in text.lower()]
        assert "<host> has no network interface 'ib7'" in text
    assert "~/cuda" in as_text


def test_what_only_looks_like_a_name_stays() -> None:
    text = Scrubber()(LOG)
    for part in (
        "~/run/train.py", "/scratch/<user>/x", "torchinductor_<user>/y", "<user>@<host>", "Using eth0:<address><0>",
        "c10::Error at::add std::string", "12:34:56,789", "test.py::test_it", "0000:3b:00.0", "2.29.7",
        "127.0.0.1:29500 and ::1",
    ):  # fmt: skip
        assert part in text
    assert Scrubber()("malice and alicex, node170") == "malice and alicex, node170"


def test_a_user_who_is_called_like_a_package_leaves_words_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "torch")
    assert Scrubber()("torch 2.14.1, import torch") == "torch 2.14.1, import torch"


def test_it_fits_an_issue_and_has_what_failed_first_and_last() -> None:
    log = "first to fail\n" + "in between\n" * 8000 + "last words"
    results = [Result(part, [Finding("x", "failed", "y" * 100)] * 30, 1.0, log) for part in PARTS]
    text = as_markdown(results, CPUS, False)
    assert len(text) < 65_536
    assert text.count("first to fail") == text.count("last words") == len(PARTS)
    assert as_json(results, CPUS, False)["parts"][0]["log"] == log
    assert shortened("0123456789", 4) == "01\n[... 6 characters ...]\n89"
    assert shortened("0123", 4) == "0123"


def test_versions_are_there_where_the_gpus_could_not_be_looked_at() -> None:
    machine = replace(CPUS, is_complete=False, driver="580.65.06")
    text = as_markdown([Result(PARTS[0], [Finding("all", "failed", "stopped")], 60.0)], machine, False)
    assert "whose GPUs could not be looked at" in text
    assert "torch 2.14.1" in text
    assert "580.65.06" in text

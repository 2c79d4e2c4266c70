"""On a single machine nothing listens on an address that others could reach; with an interface named, on that alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.workers import end_with_parent, free_port, worker_context
from tests.trainer.launching.listening_script import train

ROOT = Path(__file__).parents[3]
SCRIPT = str(Path(__file__).with_name("listening_script.py"))
PLAIN = [sys.executable, SCRIPT]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT]
LOOPBACK = {"127.0.0.1", "::1"}
ADDRESS = "10.9.8.7"
NAMESPACE = [
    "unshare", "--net", "--", "sh", "-ec",
    "ip link set lo up; ip tuntap add dev wire0 mode tun; "
    f"ip address add {ADDRESS}/24 dev wire0; ip link set wire0 up; exec \"$@\"", "sh",
]  # fmt: skip

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads sockets in /proc")


def found_by_rank(folder: Path, devices: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(devices)]


def rank_of_script(rank: int, port: int, folder: Path, kind: str, devices: int, arguments: dict[str, Any]) -> None:
    """A rank that somebody started by hand: Lightning's own environment, whose store our strategies make."""
    end_with_parent()
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.pop(name, None)
    with open(folder / f"{rank}.log", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        train(folder, kind, devices, arguments)


@pytest.mark.parametrize(
    ("kind", "devices", "arguments"),
    [("trainer", 2, {}), ("fabric", 2, {}), ("trainer", 4, {"data_parallel_size": 2})],
    ids=["trainer", "fabric", "replicas"],
)
def test_on_one_machine_loopback_alone_is_listened_on(
    tmp_path: Path, kind: str, devices: int, arguments: dict[str, Any]
) -> None:
    context, port = worker_context(), free_port()
    ranks = [
        context.Process(target=rank_of_script, args=(r, port, tmp_path, kind, devices, arguments), daemon=True)
        for r in range(devices)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        process.kill()
    logs = "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert [process.exitcode for process in ranks] == [0] * devices, logs
    check(found_by_rank(tmp_path, devices), LOOPBACK, "lo")


def check(found: list[dict[str, Any]], addresses: set[str], interface: str) -> None:
    """Everything that was listened on; torch's store, on rank 0, listens everywhere."""
    store = {"::", "0.0.0.0"}
    for rank, seen in enumerate(found):
        allowed = addresses | store if rank == 0 else addresses
        assert set(seen["in training"]) <= allowed, (rank, seen)
        assert set(seen["at setup"]) <= allowed, (rank, seen)
        assert seen["in training"], "gloo listens"
        assert (seen["gloo"], seen["nccl"]) == (interface, f"={interface}")
    listening = [len(seen["in training"]) for seen in found]
    assert listening[0] == max(listening) > min(listening), "the store listens on rank 0"
    assert any(len(seen["at setup"]) > len(seen["in training"]) for seen in found), "a stage listens for its neighbour"


def run_script(command: list[str], folder: Path, arguments: dict[str, Any], **variables: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        ["timeout", "-k", "5", "150", *command, str(folder), "trainer", "2", json.dumps(arguments)],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", [PLAIN, TORCHRUN], ids=["lightning", "torchrun"])
def test_launchers(tmp_path: Path, command: list[str]) -> None:
    """Torchrun's own process, which has the store, is not ours."""
    run_script(command, tmp_path, {})
    found = found_by_rank(tmp_path, 2)
    for seen in found:
        assert set(seen["in training"]) | set(seen["at setup"]) <= LOOPBACK | {"::", "0.0.0.0"}
    if command is PLAIN:
        check(found, LOOPBACK, "lo")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip"))), reason="makes an interface")
def test_an_interface_that_is_named_is_the_only_one(tmp_path: Path) -> None:
    run_script([*NAMESPACE, *PLAIN], tmp_path, {}, GLOO_SOCKET_IFNAME="wire0")
    found = [{**seen, "nccl": "=wire0"} for seen in found_by_rank(tmp_path, 2)]  # nothing was set about NCCL
    check(found, {ADDRESS}, "wire0")

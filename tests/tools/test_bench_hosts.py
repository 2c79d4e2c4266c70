"""Two hosts on one machine: what is refused before anything starts, and (slow, as root) what the link does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_asyncpp.tools.bench.bench import main
from lightning_asyncpp.tools.bench.harness import hosts as two_hosts
from lightning_asyncpp.tools.bench.harness.hosts import BenchmarkFailedError, open_hosts, problems_of_hosts
from lightning_asyncpp.tools.bench.names import ASYNC, ASYNC_2BW, ASYNC_SLACK_1, ONE_F_ONE_B, SYNC, ZBV

needs_hosts = pytest.mark.skipif(bool(problems_of_hosts()), reason="; ".join(problems_of_hosts()))
SHORT = ["--mini-batches", "4", "--warm-up", "2", "--repeats", "1", "--timeout", "250"]


def test_what_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(two_hosts, "_effective", lambda: 0)
    monkeypatch.setattr(two_hosts, "_TUN", tmp_path / "tun")
    monkeypatch.setattr("shutil.which", lambda name: None if name == "tc" else f"/bin/{name}")
    monkeypatch.setattr(sys, "platform", "linux")
    assert problems_of_hosts() == [
        "--hosts 2 makes network namespaces, which needs CAP_NET_ADMIN and CAP_SYS_ADMIN: call it as root",
        f"--hosts 2 needs {tmp_path / 'tun'}: load the kernel's module with `modprobe tun`",
        "--hosts 2 calls tc: install iproute2 and util-linux",
    ]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert problems_of_hosts() == ["--hosts 2 needs the network namespaces of Linux, and this is darwin"]


@pytest.mark.parametrize("command", [["schedule", "--hosts", "2"], ["network"]])
def test_nothing_is_started_without_the_rights(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(two_hosts, "_effective", lambda: 0)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(SystemExit):
        main([*command, "--stages", "3", "--micro-batches", "4"])
    printed = capsys.readouterr().err
    assert "call it as root" in printed
    assert "--hosts 2 needs an even number of stages, not 3" in printed


@pytest.mark.slow
@needs_hosts
def test_the_link_has_the_latency_and_the_bandwidth_that_were_asked_for(tmp_path: Path) -> None:
    with open_hosts(2, 20.0, 40.0, tmp_path) as hosts:
        assert 20.0 <= hosts.facts["link_ping_ms"] < 25.0
        # A megabyte takes 200 ms at 40 Mbit/s, besides the latency of the connection, of its start and of its end.
        address = hosts.addresses[1], 5000
        server = (
            f"import socket; s = socket.create_server({address}); print('up', flush=True); c, _ = s.accept()\n"
            "while c.recv(65536): pass\nc.send(b'x')"
        )
        client = (
            f"import socket, time; t = time.perf_counter(); c = socket.create_connection({address})\n"
            "c.sendall(bytes(1_000_000)); c.shutdown(socket.SHUT_WR); c.recv(1); print(time.perf_counter() - t)"
        )
        receiving = subprocess.Popen(
            [*hosts.prefixes[1], sys.executable, "-c", server], stdout=subprocess.PIPE, text=True
        )
        try:
            assert receiving.stdout is not None
            assert receiving.stdout.readline() == "up\n"
            sent = subprocess.run(
                [*hosts.prefixes[0], sys.executable, "-c", client], capture_output=True, text=True, timeout=30
            )
        finally:
            receiving.kill()
            receiving.wait()
    assert 0.2 < float(sent.stdout) < 0.6


@pytest.mark.slow
@needs_hosts
def test_stages_on_two_hosts_wait_for_the_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    sizes = ["--stages", "4", "--micro-batches", "4", "--forward-ms", "5", "--backward-ms", "10"]
    link = ["--hosts", "2", "--link-latency-ms", "15", "--link-mbit", "100"]
    main(["schedule", *sizes, *SHORT, *link, "--systems", ASYNC, SYNC, ONE_F_ONE_B, ZBV, "--json", str(file)])
    results: dict[str, Any] = json.loads(file.read_text())
    assert results["failures"] == {}
    assert 15.0 <= results["facts"]["link_ping_ms"] < 20.0
    assert results["facts"]["message_ms"] < 15.0 <= results["facts"]["link_message_ms"] < 25.0
    # A flush lets every mini-batch cross the link at least once there and back.
    assert results["systems"][ONE_F_ONE_B]["milliseconds"]["min"] >= 7 * 15 + 2 * 15
    assert "link: 15 ms asked" in capsys.readouterr().out


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize("replicas", [1, 2])
def test_two_torchruns_train_over_the_link(replicas: int, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    sizes = ["--micro-batches", "2", "--layers", "2", "--dim", "64", "--context", "16", "--rows", "2"]
    also = [ASYNC_2BW, ASYNC_SLACK_1] if replicas > 1 else []
    more = ["--also", *also] if also else []
    main(["network", *sizes, *SHORT, "--replicas", str(replicas), "--lookahead", "0", *more, "--json", str(file)])
    results = json.loads(file.read_text())
    assert set(results["systems"]) == {ASYNC, *also, SYNC, ONE_F_ONE_B}
    assert results["losses"][SYNC] == pytest.approx(results["losses"][ONE_F_ONE_B], rel=1e-4)
    assert set(results["hidden"]) == {ASYNC, *also, SYNC}
    assert results["hidden"][ASYNC] > results["hidden"][SYNC]
    assert set(results["costs"]) == set(also)
    assert all(results["hidden"][ASYNC] < results["hidden"][ASYNC_2BW] for _ in also), "replicas are waited for"


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_over_however_the_benchmark_ends(end: signal.Signals, tmp_path: Path) -> None:
    marker = f"{tmp_path.name}-{end.value}"
    command = [sys.executable, "-m", "lightning_asyncpp.tools.bench.bench", "schedule", "--hosts", "2"]
    sizes = ["--stages", "2", "--micro-batches", "2", "--mini-batches", "2000", "--systems", ONE_F_ONE_B]
    environment = {**os.environ, "ASYNCPP_TEST_MARKER": marker}
    bench = subprocess.Popen(
        [*command, *sizes], env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        assert bench.stderr is not None
        assert "processes are connected" in bench.stderr.readline()
        assert len(marked(marker)) >= 5  # the command, the relay, two starters or their ranks
        bench.send_signal(end)
        bench.wait(30)
        deadline = time.monotonic() + 15
        while marked(marker) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert marked(marker) == []
    finally:
        for process in marked(marker):
            os.kill(process, signal.SIGKILL)


def marked(marker: str) -> list[int]:
    """Processes that inherited the marker; those that only wait to be collected do not count."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"ASYNCPP_TEST_MARKER={marker}".encode() in (
                folder / "environ"
            ).read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@needs_hosts
def test_a_link_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchmarkFailedError, match=r"(?s)no link between the hosts.*'ip'"):
        with open_hosts(2, 1.0, 5.0, tmp_path):
            pass

"""Hosts to start processes on: this machine as it is, or two network namespaces of it with a slow link between."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_asyncpp.tools.bench.harness import relay
from lightning_asyncpp.tools.processes import Children, end_of

_START_SECONDS = 30.0


class BenchmarkFailedError(RuntimeError):
    """A process of the benchmark failed, or all of them together took too long."""


@dataclass(frozen=True)
class Hosts:
    """Where processes can be started.

    Attributes:
        prefixes: per host, what comes before a command that is to run there.
        addresses: per host.
        environment: variables that all processes need.
        facts: what was measured about the link.
    """

    prefixes: list[list[str]]
    addresses: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)


def wait_for(
    children: Children, seconds: float, reason: Callable[[str], str], tick: Callable[[], None] = lambda: None
) -> None:
    """Until all processes of the benchmark have ended well.

    Args:
        children: that were started.
        seconds: that they may take from now on.
        reason: name of the one that failed -> what is said of it.
        tick: is called again and again meanwhile.

    Raises:
        BenchmarkFailedError: one failed, or they take longer.
    """
    try:
        failed = children.wait(seconds, tick)
    except TimeoutError:
        raise BenchmarkFailedError(
            "the benchmark took longer than --timeout: raise it, or run fewer mini-batches"
        ) from None
    if failed is not None:
        raise BenchmarkFailedError(reason(failed))


@contextmanager
def open_hosts(count: int, latency_ms: float, mbit: float, folder: Path) -> Iterator[Hosts]:
    """One host, which is this machine, or two with a link between them, which are gone afterwards.

    Args:
        count: 1 or 2.
        latency_ms: of the link, one way.
        mbit: bandwidth of the link in Mbit/s, each way; 0: no limit.
        folder: gets the relay's log.

    Raises:
        BenchmarkFailedError: the link cannot be made; see :func:`problems_of_hosts`.
    """
    if count == 1:
        yield Hosts([[]], ["127.0.0.1"])
        return
    with Children(folder) as children:
        children.start("link", [sys.executable, relay.__file__, str(latency_ms), str(mbit)])
        ready = _ready(children)
        prefixes = [["nsenter", f"--net={namespace}", "--"] for namespace in ready["namespaces"]]
        # gloo would look for an interface by the machine's name, which no namespace has.
        environment = {"GLOO_SOCKET_IFNAME": relay.INTERFACE, "TP_SOCKET_IFNAME": relay.INTERFACE}
        facts = {"link_latency_ms": latency_ms, "link_mbit": mbit, "link_ping_ms": ready["one_way_ms"]}
        yield Hosts(prefixes, list(relay.ADDRESSES), environment, facts)


def _ready(children: Children) -> dict[str, Any]:
    """What the relay says once it works."""
    deadline = time.monotonic() + _START_SECONDS
    log = children.log("link")
    while "\n" not in (text := end_of(log)) or not text.startswith("{"):
        if children.ended("link") or time.monotonic() > deadline:
            raise BenchmarkFailedError(f"there is no link between the hosts:\n{end_of(log)}")
        time.sleep(0.05)
    return json.loads(text)  # type: ignore[no-any-return]


_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # for devices, and for namespaces
_TUN = Path("/dev/net/tun")


def problems_of_hosts() -> list[str]:
    """What this machine lacks for ``--hosts 2``, all of it, each with its mend."""
    if not sys.platform.startswith("linux"):
        return [f"--hosts 2 needs the network namespaces of Linux, and this is {sys.platform}"]
    problems = []
    missing = [name for name, bit in _CAPABILITIES.items() if not _effective() >> bit & 1]
    if missing:
        problems.append(f"--hosts 2 makes network namespaces, which needs {' and '.join(missing)}: call it as root")
    if not _TUN.is_char_device():
        problems.append(f"--hosts 2 needs {_TUN}: load the kernel's module with `modprobe tun`")
    commands = [name for name in ("ip", "tc", "nsenter") if shutil.which(name) is None]
    if commands:
        problems.append(f"--hosts 2 calls {', '.join(commands)}: install iproute2 and util-linux")
    return problems


def _effective() -> int:
    """This process's capabilities, a bit each."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("CapEff:")), 16)

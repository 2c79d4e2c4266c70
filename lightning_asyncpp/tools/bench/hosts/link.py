"""Hosts to start processes on: this machine as it is, or two network namespaces of it with a slow link between."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_asyncpp.tools.bench.hosts import relay
from lightning_asyncpp.tools.bench.processes import BenchmarkFailedError, Children, end_of

_START_SECONDS = 30.0


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

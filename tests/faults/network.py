"""Two hosts whose link can be cut: network namespaces, which only root can create."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from research.benchmarks import link
from tests.faults.launch import Host


@contextmanager
def two_hosts() -> Iterator[tuple[list[Host], int]]:
    """Yield the hosts of two ranks, and the id of the process that relays packets between them.

    Once that process is stopped, the link is like a cut cable: nothing arrives, and neither host is notified.
    """
    relay = subprocess.Popen([sys.executable, link.__file__, "0.1", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert relay.stdout is not None
        namespaces = json.loads(relay.stdout.readline())["namespaces"]
        shared = {"MASTER_ADDR": link.ADDRESSES[0], "GLOO_SOCKET_IFNAME": link.INTERFACE}
        own = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        yield [Host(name, {**shared, **own, "GROUP_RANK": str(r)}) for r, name in enumerate(namespaces)], relay.pid
    finally:
        relay.kill()
        relay.wait(10)

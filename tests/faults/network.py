"""Two hosts of which the link can be cut: network namespaces, for which one has to be root."""

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
    """Where two ranks run, and the process that passes on what one of their hosts sends to the other.

    Stopped, it is as a cable that was cut: nothing arrives, and nobody is told.
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

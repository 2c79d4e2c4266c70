"""Two hosts of which the link can be cut: network namespaces, for which one has to be root."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_asyncpp.tools.bench.harness import relay
from lightning_asyncpp.tools.bench.harness.hosts import problems_of_hosts
from tests.faults.launch import Hosts


def why_not() -> str:
    """Why there can be none here; nothing if there can."""
    return "; ".join(problems_of_hosts())


@contextmanager
def two_hosts() -> Iterator[tuple[Hosts, int]]:
    """Where two ranks run, and the process that passes on what one of their hosts sends to the other.

    Stopped, it is as a cable that was cut: nothing arrives, and nobody is told.
    """
    link = subprocess.Popen([sys.executable, relay.__file__, "0.1", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert link.stdout is not None
        namespaces = json.loads(link.stdout.readline())["namespaces"]
        yield Hosts(tuple(namespaces), relay.ADDRESSES[0], {"GLOO_SOCKET_IFNAME": relay.INTERFACE}), link.pid
    finally:
        link.kill()
        link.wait(10)

"""The link between two network namespaces: ``python relay.py LATENCY_MS MBIT``, as root on Linux.

Each namespace gets a TUN device; whatever one host sends is read here, kept for the latency, and written to the
other. The bandwidth is the kernel's (``tc tbf`` in front of each device). The namespaces have no names: the kernel
removes them with the last process that uses them, however this one ends, and nothing is ever left over.

This is a program in Python between the hosts, and it takes its time: it sends a few packets there and back before it
says, in a line of JSON, that it is ready, and how long they took.

Imports nothing but the standard library, so that it starts at once.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

INTERFACE = "asyncpp0"
ADDRESSES = ("10.211.0.1", "10.211.0.2")
MTU = 9000  # bytes, as between machines of a cluster: a packet costs this program the same whatever its size
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PINGS = 11


@dataclass
class Host:
    """One end of the link.

    Attributes:
        device: the TUN device, open.
        namespace: the network namespace, open.
        socket: for pings, inside the namespace.
    """

    device: int
    namespace: int
    socket: socket.socket


def main(argv: list[str]) -> None:
    """Make the hosts, say how to enter them, and relay until killed."""
    latency, mbit = float(argv[0]) / 1e3, float(argv[1])
    hosts = [make_host(address, mbit) for address in ADDRESSES]
    with suppress(OSError):  # a network card does not wait for a core either
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    threading.Thread(target=_say_ready, args=(hosts,), daemon=True).start()
    relay(hosts[0].device, hosts[1].device, latency)


def make_host(address: str, mbit: float) -> Host:
    """Make a namespace and a device in it; this thread stays in the namespace.

    Args:
        address: of the host on the link.
        mbit: bandwidth of what it sends, in Mbit/s; 0: no limit.

    Raises:
        OSError: a namespace or a device cannot be made.
        RuntimeError: ``ip`` or ``tc`` fails; with its message.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"no new network namespace: {os.strerror(ctypes.get_errno())}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    _call("ip link set lo up")
    _call(f"ip addr add {address}/30 dev {INTERFACE}")
    _call(f"ip link set {INTERFACE} mtu {MTU} up")
    if mbit:
        # What 2 ms let through: less, and the kernel's clock would be the limit.
        burst = max(4 * MTU, round(mbit * 1e6 / 8 * 2e-3))
        _call(f"tc qdisc add dev {INTERFACE} root tbf rate {round(mbit * 1e6)} burst {burst} latency 400ms")
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.settimeout(10)
    udp.bind((address, 0))
    return Host(device, os.open("/proc/self/ns/net", os.O_RDONLY), udp)


def _call(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"`{command}` failed: {done.stderr.strip()}")


def relay(one: int, other: int, latency: float) -> None:
    """Pass packets between two devices for ever, each of them ``latency`` seconds late."""
    opposite = {one: other, other: one}
    waiting: deque[tuple[float, int, bytes]] = deque()  # the latency is the same for all: first in, first out
    while True:
        now = time.perf_counter()
        while waiting and waiting[0][0] <= now:
            _, device, packet = waiting.popleft()
            with suppress(OSError):  # full: the packet is lost, as packets are
                os.write(device, packet)
        patience = max(0.0, waiting[0][0] - time.perf_counter()) if waiting else None
        readable, _, _ = select.select([one, other], [], [], patience)
        for device in readable:
            due = time.perf_counter() + latency
            with suppress(BlockingIOError):
                while True:
                    waiting.append((due, opposite[device], os.read(device, MTU + 100)))


def _say_ready(hosts: list[Host]) -> None:
    times = [_round_trip(*(host.socket for host in hosts)) for _ in range(_PINGS)]
    namespaces = [f"/proc/{os.getpid()}/fd/{host.namespace}" for host in hosts]
    print(json.dumps({"namespaces": namespaces, "one_way_ms": statistics.median(times[1:]) / 2 * 1e3}), flush=True)


def _round_trip(here: socket.socket, there: socket.socket) -> float:
    start = time.perf_counter()
    here.sendto(b"ping", there.getsockname())
    _, back = there.recvfrom(16)
    there.sendto(b"pong", back)
    here.recvfrom(16)
    return time.perf_counter() - start


if __name__ == "__main__":
    main(sys.argv[1:])

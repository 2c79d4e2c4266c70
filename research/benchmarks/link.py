"""A slow link between two hosts of this machine: ``python link.py LATENCY_MS MBIT``, as root on Linux.

Two network namespaces get a TUN device each; what one host sends is read here, kept for the latency, and written to the
other. The bandwidth is the kernel's (``tc tbf`` in front of each device). The namespaces have no names: the kernel
removes them with the last process that uses them. This program takes its time, so it sends a few packets there and back
first, and prints in a line of JSON how long they took. It imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

INTERFACE = "asyncpp0"
ADDRESSES = ("10.211.0.1", "10.211.0.2")
MTU = 9000  # as between machines of a cluster: a packet costs this program the same whatever its size
_NEW_NETWORK = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CAPABILITIES = (12, 21)  # CAP_NET_ADMIN for devices, CAP_SYS_ADMIN for namespaces


@dataclass(frozen=True)
class Hosts:
    """Where processes run.

    Attributes:
        addresses: per host.
        namespaces: per host, the file that stands for its network; none where there is one host, this machine.
        environment: variables that all processes need.
        facts: what was measured of the link, in words.
    """

    addresses: tuple[str, ...]
    namespaces: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    facts: tuple[str, ...] = ()

    def enter(self, host: int) -> None:
        """Move this process to a host."""
        if self.namespaces:
            with open(self.namespaces[host]) as namespace:
                _call_libc("setns", namespace.fileno(), _NEW_NETWORK)


OpenedHosts: TypeAlias = AbstractContextManager[Hosts]


def missing() -> str:
    """What this machine lacks for two hosts; nothing if it can have them."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    status = Path("/proc/self/status").read_text().splitlines()
    effective = int(next(line.split()[1] for line in status if line.startswith("CapEff:")), 16)
    needs = {
        "root": all(effective >> bit & 1 for bit in _CAPABILITIES),
        "/dev/net/tun": Path("/dev/net/tun").is_char_device(),
        **{command: shutil.which(command) is not None for command in ("ip", "tc")},
    }
    return ", ".join(name for name, is_there in needs.items() if not is_there)


@contextmanager
def open_hosts(latency_ms: float, mbit: float) -> Iterator[Hosts]:
    """Two hosts with a link between them."""
    if problem := missing():
        raise RuntimeError(f"--hosts 2 needs {problem}. Run it as root on Linux, with iproute2 and the module tun.")
    command = [sys.executable, __file__, str(latency_ms), str(mbit)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as relay:
        try:
            assert relay.stdout is not None
            ready = json.loads(relay.stdout.readline())
            fact = f"link: {latency_ms:g} ms asked, {ready['one_way_ms']:.2f} ms measured one way, {mbit:g} Mbit/s"
            # gloo would look for an interface by the machine's name, which no namespace has.
            yield Hosts(ADDRESSES, tuple(ready["namespaces"]), {"GLOO_SOCKET_IFNAME": INTERFACE}, (fact,))
        finally:
            relay.kill()


def _call_libc(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name} failed: {os.strerror(ctypes.get_errno())}")


@dataclass
class _End:
    """One end of the link: its TUN device, its namespace, and a socket inside of it for pings."""

    device: int
    namespace: int
    socket: socket.socket


def _make_end(address: str, mbit: float) -> _End:
    """Make a namespace with a device; this thread stays in it."""
    _call_libc("unshare", _NEW_NETWORK)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    commands = ["ip link set lo up", f"ip addr add {address}/30 dev {INTERFACE}"]
    commands.append(f"ip link set {INTERFACE} mtu {MTU} up")
    if mbit:
        burst = max(4 * MTU, round(mbit * 1e6 / 8 * 2e-3))  # 2 ms: with less, the kernel's clock would be the limit
        rate = f"rate {round(mbit * 1e6)} burst {burst} latency 400ms"
        commands.append(f"tc qdisc add dev {INTERFACE} root tbf {rate}")
    for command in commands:
        subprocess.run(command.split(), check=True, timeout=30)
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.settimeout(10)
    udp.bind((address, 0))
    return _End(device, os.open("/proc/self/ns/net", os.O_RDONLY), udp)


def _relay(one: int, other: int, latency: float) -> None:
    """Pass packets between two devices for ever, each of them ``latency`` seconds late."""
    opposite = {one: other, other: one}
    waiting: deque[tuple[float, int, bytes]] = deque()  # the latency is the same for all: first in, first out
    while True:
        while waiting and waiting[0][0] <= time.perf_counter():
            _, device, packet = waiting.popleft()
            with suppress(OSError):  # full: the packet is lost, as packets are
                os.write(device, packet)
        patience = max(0.0, waiting[0][0] - time.perf_counter()) if waiting else None
        for device in select.select([one, other], [], [], patience)[0]:
            due = time.perf_counter() + latency
            with suppress(BlockingIOError):
                while True:
                    waiting.append((due, opposite[device], os.read(device, MTU + 100)))


def _announce(ends: list[_End]) -> None:
    times = [_round_trip(*(end.socket for end in ends)) for _ in range(11)]
    namespaces = [f"/proc/{os.getpid()}/fd/{end.namespace}" for end in ends]
    print(json.dumps({"namespaces": namespaces, "one_way_ms": statistics.median(times[1:]) / 2 * 1e3}), flush=True)


def _round_trip(here: socket.socket, there: socket.socket) -> float:
    start = time.perf_counter()
    for sender, receiver in ((here, there), (there, here)):
        sender.sendto(b"ping", receiver.getsockname())
        receiver.recvfrom(16)
    return time.perf_counter() - start


def main(argv: list[str]) -> None:
    """Make the hosts, say how to enter them, and relay until killed."""
    latency, mbit = float(argv[0]) / 1e3, float(argv[1])
    ends = [_make_end(address, mbit) for address in ADDRESSES]
    with suppress(OSError):  # a network card does not wait for a core either
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    threading.Thread(target=_announce, args=(ends,), daemon=True).start()
    _relay(ends[0].device, ends[1].device, latency)


if __name__ == "__main__":
    main(sys.argv[1:])

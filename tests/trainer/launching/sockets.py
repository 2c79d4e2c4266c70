"""What a process listens on, read from /proc."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path

_LISTENING = "0A"


def listening_addresses(process: int | str = "self") -> list[str]:
    """The addresses of the TCP sockets that a process listens on, such as ``127.0.0.1`` or ``0.0.0.0``."""
    inodes = _sockets_of(process)
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                found.append(_address(fields[1].partition(":")[0]))
    return sorted(found)


def _sockets_of(process: int | str) -> set[str]:
    inodes = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if match := re.fullmatch(r"socket:\[(\d+)\]", target):
            inodes.add(match[1])
    return inodes


def _address(hexadecimal: str) -> str:
    # Words of four bytes, each in the machine's own order: little-endian wherever this runs.
    words = [bytes.fromhex(hexadecimal[i : i + 8])[::-1] for i in range(0, len(hexadecimal), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)

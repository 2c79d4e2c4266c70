"""What two hosts on one machine need; checked before anything is started."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

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

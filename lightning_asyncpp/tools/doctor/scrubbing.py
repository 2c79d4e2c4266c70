"""Takes out of a report what says whose machine it is: names of host and user, the home folder, addresses."""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import re
import socket
from pathlib import Path
from typing import Any

_IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?!\w|\.\d)")
_COLONS = re.compile(r"(?<![\w:.])[0-9A-Fa-f]*:[0-9A-Fa-f:]*(?:[0-9A-Fa-f]|::)(?!\w|:[\w:])")
"""What may be an address of IPv6, or of hardware."""


class Scrubber:
    """Replaces them in a text, or in all texts of lists and mappings, whose keys stay; loopback stays, too."""

    def __init__(self) -> None:
        self._names: list[tuple[re.Pattern[str], str]] = []
        with contextlib.suppress(RuntimeError):
            if len(home := str(Path.home())) > 1:  # "/" in some containers
                self._names.append((re.compile(rf"{re.escape(home)}(?![\w.-])"), "~"))
        for host in _hosts():
            self._names.append((re.compile(rf"(?<![\w-]){re.escape(host)}(?![\w-])", re.IGNORECASE), "<host>"))
        with contextlib.suppress(KeyError, OSError):
            # Not in every place: it may be a word, such as "torch".
            user = re.escape(getpass.getuser())
            self._names.append((re.compile(rf"(?<=[/_]){user}(?!\w)|(?<!\w){user}(?=@)"), "<user>"))

    def __call__(self, value: Any) -> Any:
        """The same without them."""
        if isinstance(value, dict):
            return {key: self(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(one) for one in value]
        return self._text(value) if isinstance(value, str) else value

    def _text(self, text: str) -> str:
        for pattern, instead in self._names:
            text = pattern.sub(instead, text)
        return _COLONS.sub(_address, _IPV4.sub(_address, text))


def _hosts() -> list[str]:
    """This machine's name, and its short form."""
    name = socket.gethostname()
    return [host for host in dict.fromkeys((name, name.partition(".")[0])) if host not in ("", "localhost")]


def _address(match: re.Match[str]) -> str:
    text = match[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return "<address>" if text.count(":") >= 5 else text  # of hardware, or cut off
    return text if address.is_loopback or address.is_unspecified else "<address>"

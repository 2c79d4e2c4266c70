"""Short digests, and bounded samples, of what is too large to be compared whole."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from pathlib import Path

_END_BYTES = 64 * 2**10


def digest(parts: Iterable[bytes]) -> str:
    """A digest of parts, of which the bounds count: 16 hexadecimal digits."""
    total = hashlib.sha256()
    for part in parts:
        total.update(struct.pack("<q", len(part)))
        total.update(part)
    return total.hexdigest()[:16]


def ends_of(path: Path, most: int = _END_BYTES) -> bytes:
    """Size, first and last bytes of a file.

    Args:
        path: of a regular file.
        most: bytes of each end.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(most)
        file.seek(max(0, size - most))
        return struct.pack("<q", size) + head + file.read(most)


def evenly(count: int, most: int) -> list[int]:
    """Indices of at most so many of ``count`` things, evenly spread, with the first and the last."""
    return list(range(count)) if count <= most else [i * (count - 1) // (most - 1) for i in range(most)]

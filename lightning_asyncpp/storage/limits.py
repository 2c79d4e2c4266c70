"""What a checkpoint may ask for: no more than its size accounts for.

A few bytes can say that a tensor has petabytes, of a number that is repeated, that a list holds itself, or the same two
lists fifty levels deep: whoever walks over it would never end.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_asyncpp.storage.durable import size_of

_LEVELS = 100
_VALUES, _VALUES_PER_BYTE = 2**20, 8
_BYTES, _BYTES_PER_BYTE = 2**28, 8
_PLAIN = (int, float, bool, type(None))
_PICKLE = "/data.pkl"


class LimitError(ValueError):
    """A file asks for more than its size accounts for; the message continues a sentence about it."""


def check_entries(file: BinaryIO) -> int:
    """Refuse an archive whose entries take more than they have in the file; ``torch.save`` compresses none.

    Args:
        file: a zip archive.

    Returns:
        The size of what is no tensor, in bytes; of the whole file if that cannot be told.

    Raises:
        LimitError: there is such an entry.
        zipfile.BadZipFile: it cannot be taken apart.
    """
    size = size_of(file)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise LimitError(
                f"its entry {entry.filename} is compressed, from {entry.file_size} bytes, and torch writes none that is"
            )
    if (declared := sum(entry.file_size for entry in entries)) > size:
        raise LimitError(f"its entries have {declared} bytes, and the file {size}")
    return next((entry.file_size for entry in entries if entry.filename.endswith(_PICKLE)), size)


def check_content(content: Any, num_bytes: int, pickle_bytes: int) -> None:
    """Refuse content that is larger than the files it was read from account for.

    Args:
        content: nested containers; other objects than those of plain data are not looked into.
        num_bytes: of all files.
        pickle_bytes: of what is no tensor in them.

    Raises:
        LimitError: it is, it holds itself, or it has more levels than any checkpoint.
    """
    measure = _Measure()
    values, _ = measure.of(content, 0)
    if values > _VALUES + _VALUES_PER_BYTE * pickle_bytes:
        raise LimitError(f"it has {values} values, most of them the same ones again, in {pickle_bytes} bytes")
    if measure.num_bytes > _BYTES + _BYTES_PER_BYTE * num_bytes:
        raise LimitError(f"its tensors and texts would take {measure.num_bytes} bytes, and the file has {num_bytes}")


class _Measure:
    """Sizes of nested content, each container measured once.

    Attributes:
        num_bytes: of all tensors, texts and the like; of one that is at several places once.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._known: dict[int, tuple[int, int]] = {}
        self._tensors: set[tuple[Any, ...]] = set()

    def of(self, node: Any, level: int) -> tuple[int, int]:
        """How many values it holds, the same ones counted again, and how many levels.

        Raises:
            LimitError: there are too many levels.
        """
        if isinstance(node, Mapping):
            children: Any = (child for pair in node.items() for child in pair)
        elif isinstance(node, (list, tuple, set, frozenset)):
            children = node
        else:
            self._count_bytes(node)
            return 1, 0
        values, levels = self._known.get(id(node), (0, 0))
        if not values:
            values = 1
            for child in children:
                if type(child) in _PLAIN:
                    values += 1
                    continue
                _check_level(level)
                below, depth = self.of(child, level + 1)
                values, levels = values + below, max(levels, depth + 1)
            self._known[id(node)] = values, levels
        _check_level(level + levels)
        return values, levels

    def _count_bytes(self, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            parts = _parts(leaf)
        elif isinstance(leaf, (str, bytes, bytearray)):
            parts = [((id(leaf),), len(leaf))]
        else:
            return
        for place, num_bytes in parts:
            if place not in self._tensors:
                self._tensors.add(place)
                self.num_bytes += num_bytes


def _check_level(level: int) -> None:
    if level > _LEVELS:
        raise LimitError(f"RecursionError: it holds itself, or has more than {_LEVELS} levels")


def _parts(tensor: Tensor) -> list[tuple[tuple[Any, ...], int]]:
    """Where the dense tensors are that one consists of, and how many bytes each takes as one of its own."""
    if tensor.layout == torch.sparse_coo:
        return _parts(tensor._indices()) + _parts(tensor._values())
    if tensor.layout != torch.strided or tensor.is_meta:
        return []
    try:
        start = tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a class around other tensors, which the user has allowed
        return []
    place = start, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return [(place, tensor.numel() * tensor.element_size())]

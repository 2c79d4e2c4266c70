"""What a checkpoint may ask for: no more than its size accounts for.

A few bytes can say that a tensor has petabytes, of a number that is repeated, that a list holds itself, or the same two
lists fifty levels deep: whoever walks over it would never end.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Mapping
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from lightning_asyncpp.storage.durable import size_of

_LEVELS = 100
_VALUES, _VALUES_PER_BYTE = 2**20, 8
_BYTES, _BYTES_PER_BYTE = 2**28, 8
_PLAIN = (int, float, bool, type(None))
_PICKLE = "/data.pkl"
_BYTES_OF = b"bytearray"
_BLOCK_BYTES = 2**20
_MARK = object()
_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _ROWS, torch.sparse_bsr: _ROWS, torch.sparse_csc: _COLUMNS, torch.sparse_bsc: _COLUMNS,
}  # fmt: skip
_OFF = {
    "TUPLE": None, "APPENDS": None, "SETITEMS": None, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "BUILD": 1,
    "SETITEM": 2, "BINPERSID": 1,
}  # fmt: skip
"""Instruction of a pickle -> how many it takes off the stack; with None all that are above the last mark."""


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
        _check_declared(entries, size)
        pickles = [entry for entry in entries if entry.filename.endswith(_PICKLE)]
        for entry in pickles:
            check_calls(io.BytesIO(archive.read(entry)), 1)
    return pickles[0].file_size if pickles else size


def _check_declared(entries: list[zipfile.ZipInfo], size: int) -> None:
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise LimitError(
                f"its entry {entry.filename} is compressed, from {entry.file_size} bytes, and torch writes none that is"
            )
    if (declared := sum(entry.file_size for entry in entries)) > size:
        raise LimitError(f"its entries have {declared} bytes, and the file {size}")


def check_calls(file: BinaryIO, pickles: int) -> None:
    """Refuse pickles that would have bytes made of a number, as many of them: the only such call that is allowed there.

    Args:
        file: begins with them.
        pickles: how many.

    Raises:
        LimitError: there is such a call.
    """
    file.seek(0)
    if not _has(file, _BYTES_OF):
        return
    file.seek(0)
    for _ in range(pickles):
        _check_calls(file)


def _has(file: BinaryIO, text: bytes) -> bool:
    """Whether a text is in what follows in a file, which need not fit into memory."""
    before = b""
    while block := file.read(_BLOCK_BYTES):
        if text in before + block:
            return True
        before = block[-len(text) :]
    return False


def _check_calls(file: BinaryIO) -> None:
    """Go through the instructions of a pickle as an unpickler does; numbers, tuples and names alone are kept."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for code, given, _ in pickletools.genops(cast("IO[bytes]", file)):
        name = code.name
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[given] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[given])
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = stack.pop(), stack.pop()
            if str(function).endswith(_BYTES_OF.decode()) and (
                not isinstance(arguments, tuple) or isinstance(next(iter(arguments), None), int)
            ):
                raise LimitError("it has bytes that are made of a number, which no file has")
            stack.append(None)
        elif name in _OFF:
            taken = _taken(stack, _OFF[name])
            stack += [tuple(taken)] if name.startswith("TUPLE") else [None] if name == "BINPERSID" else []
        elif name not in ("PROTO", "STOP"):
            stack.append(_MARK if name == "MARK" else () if name == "EMPTY_TUPLE" else given)


def _taken(stack: list[Any], number: int | None) -> list[Any]:
    """Take so many off a stack, or with None all that are above the last mark, and the mark."""
    start = len(stack) - number if number is not None else len(stack) - stack[::-1].index(_MARK)
    taken = stack[start:]
    del stack[start if number is not None else start - 1 :]
    return taken


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
            parts = dense_parts(leaf)
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


def dense_parts(tensor: Tensor) -> list[tuple[tuple[Any, ...], int]]:
    """Where the dense tensors are that one consists of, and how many bytes each takes as one of its own."""
    if tensor.layout != torch.strided:
        return [found for part in _PARTS.get(tensor.layout, ()) for found in dense_parts(getattr(tensor, part)())]
    if tensor.is_meta:  # it takes none before somebody makes a real one of it
        return [((id(tensor),), tensor.numel() * tensor.element_size())]
    try:
        start = tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a class around other tensors, which the user has allowed
        return []
    place = start, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return [(place, tensor.numel() * tensor.element_size())]

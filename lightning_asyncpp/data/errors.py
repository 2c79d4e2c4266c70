"""What is raised when data cannot be used."""

from __future__ import annotations


class DataError(ValueError):
    """The data, or what was asked of it, is wrong; the message names the file or the argument, and what would work."""

"""What is wrong with a checkpoint on disk."""


class StorageError(OSError):
    """Can this checkpoint be written, or read? Names the file, what is wrong with it, and the mend."""

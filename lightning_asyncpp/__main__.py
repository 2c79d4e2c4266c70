"""``python -m lightning_asyncpp``: the same as ``asyncpp``, as torchrun wants it."""

from lightning_asyncpp.cli import main

if __name__ == "__main__":
    main()

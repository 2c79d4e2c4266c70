"""``python -m lightning_asyncpp``: the ``asyncpp`` command, in a form that torchrun can start."""

from lightning_asyncpp.cli import main

if __name__ == "__main__":
    main()

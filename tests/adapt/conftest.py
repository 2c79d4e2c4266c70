"""The pools of processes of the Trainer's tests."""

from tests.trainer.conftest import pools

__all__ = ["pools"]

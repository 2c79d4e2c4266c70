"""The Fabric strategies' tests run in the Trainer tests' worker pools."""

from tests.trainer.conftest import pools as pools

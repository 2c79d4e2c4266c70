"""Names that moved to :mod:`tests.helpers.pool`."""

from tests.helpers.pool import (  # noqa: F401
    EnginePools,
    Prepare,
    WorkerPool,
)

"""Names that moved to :mod:`tests.helpers.pool`."""

from tests.helpers.pool import (  # noqa: F401
    Closable,
    P,
    end_with_parent,
    free_port,
    opened,
    worker_context,
)

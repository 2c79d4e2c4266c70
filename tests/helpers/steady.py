"""Names that moved to :mod:`tests.helpers.engine`."""

from tests.helpers.engine import (  # noqa: F401
    steady_utilisation,
)

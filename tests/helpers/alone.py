"""Names that moved to :mod:`tests.helpers.programs`."""

from tests.helpers.programs import (  # noqa: F401
    allocated,
    run_script,
)

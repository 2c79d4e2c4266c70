"""Names that moved to :mod:`tests.helpers.programs`."""

from tests.helpers.programs import (  # noqa: F401
    Ended,
    end_process,
    run,
    run_ranks,
    start,
)

"""Names that moved to :mod:`tests.helpers.random_cases`."""

from tests.helpers.random_cases import (  # noqa: F401
    Leg,
    chains,
    expected_case,
)

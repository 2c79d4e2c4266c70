"""Names that moved to :mod:`tests.helpers.engine`."""

from tests.helpers.engine import (  # noqa: F401
    Results,
    assert_same_losses,
    assert_same_norms,
    assert_same_statistics,
    assert_same_weights,
    check_random_case,
    weights_of,
)

"""Names that moved to :mod:`tests.helpers.cases`."""

from tests.helpers.cases import (  # noqa: F401
    FORMS,
    KINDS,
    SHARED,
    Inside,
    Layer,
    leaves_of,
    make,
    one_tensor,
)

from tests.helpers.models import exported  # noqa: F401

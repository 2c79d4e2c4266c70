from tests.helpers.models import unigram_loss  # noqa: F401

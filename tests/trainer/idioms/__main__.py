"""Write ``docs/reference/idioms.md``: ``python -m tests.trainer.idioms``."""

from tests.trainer.idioms.page import PAGE, page

PAGE.write_text(page())

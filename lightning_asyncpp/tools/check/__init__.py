"""Verifying a model of one's own: what would a pipeline make of it?"""

from lightning_asyncpp.tools.check.check import check_model
from lightning_asyncpp.tools.check.report import CheckReport

__all__ = ["CheckReport", "check_model"]

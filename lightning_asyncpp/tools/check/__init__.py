"""Verifying a model of one's own: what would a pipeline make of it?"""

from lightning_asyncpp.tools.check.check_report import CheckReport
from lightning_asyncpp.tools.check.model_check import check_model

__all__ = ["CheckReport", "check_model"]

"""Comparison of a module's first updates in a pipeline and in one process."""

from lightning_asyncpp.tools.check.model_check import check_model
from lightning_asyncpp.tools.check.record import CheckReport, Difference

__all__ = ["CheckReport", "Difference", "check_model"]

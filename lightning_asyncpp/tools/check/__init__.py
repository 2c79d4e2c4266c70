"""The first updates of a module, compared: does a pipeline train it as one process does?"""

from lightning_asyncpp.tools.check.model_check import check_model
from lightning_asyncpp.tools.check.record import CheckReport, Difference

__all__ = ["CheckReport", "Difference", "check_model"]

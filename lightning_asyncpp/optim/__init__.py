"""Optimizers and corrections for training with delayed gradients: plain torch optimizers, usable anywhere.

Nothing here imports Lightning, or knows of strategies and pipelines.
"""

from lightning_asyncpp.optim.correction import WeightPrediction
from lightning_asyncpp.optim.error_feedback import ErrorFeedback
from lightning_asyncpp.optim.muon import MuonAdamW, NorMuonAdamW
from lightning_asyncpp.optim.soap import SOAP

__all__ = ["SOAP", "ErrorFeedback", "MuonAdamW", "NorMuonAdamW", "WeightPrediction"]

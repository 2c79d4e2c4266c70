"""Optimizers and corrections for training with delayed gradients: plain torch optimizers, usable anywhere.

Nothing here imports Lightning, or knows of strategies and pipelines.
"""

from lightning_asyncpp.optim.error_feedback import ErrorFeedback
from lightning_asyncpp.optim.muon import MuonAdamW
from lightning_asyncpp.optim.normuon import NorMuonAdamW
from lightning_asyncpp.optim.soap import SOAP
from lightning_asyncpp.optim.weight_prediction import WeightPrediction

__all__ = ["SOAP", "ErrorFeedback", "MuonAdamW", "NorMuonAdamW", "WeightPrediction"]

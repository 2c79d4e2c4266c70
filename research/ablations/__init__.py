"""Grids of trainings that compare optimizers, delays and corrections: ``python -m research.ablations RECIPE``."""

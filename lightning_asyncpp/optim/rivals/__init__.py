"""Optimizers and corrections that others published, for comparison: docs/research/evidence.md tells how they do."""

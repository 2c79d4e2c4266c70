"""Optimizers and corrections that others published, for comparison: docs/evidence.md tells how they do."""

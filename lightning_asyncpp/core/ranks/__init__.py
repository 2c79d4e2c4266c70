"""Mesh of ranks, process groups, and agreement among all ranks."""

"""Experiments behind the published figures: a part of the repository, not of the wheel."""

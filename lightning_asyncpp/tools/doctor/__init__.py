"""Examines an installation."""

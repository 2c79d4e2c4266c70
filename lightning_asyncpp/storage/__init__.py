"""Checkpoints as files: one file, or a folder that every stage writes its part of; both are data, and hold no code."""

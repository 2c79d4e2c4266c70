"""Idioms of Lightning's documentation, each as a module or as arguments of a run, with what becomes of it here."""

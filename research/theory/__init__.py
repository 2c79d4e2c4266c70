"""The iterations, formulas and tables of research/notes/theory.md; nothing of the package."""

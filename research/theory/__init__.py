"""The iterations, formulas and tables of docs/research/theory.md; nothing of the package."""

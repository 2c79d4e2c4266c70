"""``python -m lightning_asyncpp.tools.ablation.report FOLDER``."""

from lightning_asyncpp.tools.ablation.report.writing import main

main()

"""``python -m lightning_asyncpp.tools.ablation.report FOLDER``."""

from lightning_asyncpp.tools.ablation.report.writing import main

if __name__ == "__main__":
    main()

"""Print the tables of research/notes/theory.md: ``python -m research.theory``."""

from research.theory.tables import TABLES

for name, table in TABLES.items():
    print(f"<!-- table: {name} -->")
    for label, numbers in table().items():
        print(f"| {label} | " + " | ".join(f"{number:.4g}" for number in numbers) + " |")

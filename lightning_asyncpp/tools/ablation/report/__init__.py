"""From the CSV files of an ablation to its tables and plots."""

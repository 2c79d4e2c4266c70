"""`asyncpp ablate`: grids of trainings, their tables and plots."""

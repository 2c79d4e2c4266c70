"""What an ablation trains: its recipe, read and checked, and the trainings that it needs next."""

"""The trainings of an ablation: processes, their folders and what they leave there."""

"""The mesh of ranks, its process groups, and agreement among all ranks."""

"""Recording what a running pipeline does: spans into files, one per rank, on one clock."""

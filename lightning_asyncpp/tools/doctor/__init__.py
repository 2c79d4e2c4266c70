"""``asyncpp doctor``: examines an installation, with GPUs or without, and writes a report."""

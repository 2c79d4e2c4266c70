"""``self.log`` over stages: recorded where steps run, known to every rank, logged once."""

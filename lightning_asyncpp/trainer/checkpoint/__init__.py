"""What a Trainer's checkpoints hold beside weights, and how a run goes on where it was."""

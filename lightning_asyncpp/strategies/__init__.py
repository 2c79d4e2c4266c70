"""What the Trainer's and Fabric's strategies share: arguments, process group, loaders, checkpoints, recording."""

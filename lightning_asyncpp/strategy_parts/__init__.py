"""What the Trainer's and Fabric's strategies are made of: arguments, process group, loaders, checkpoints, recording."""

"""Parts of the Trainer's and Fabric's strategies: arguments, process group, loaders, checkpoints, recording."""

"""Messages between neighbouring stages: headers, activations and gradients, over sockets or NCCL."""

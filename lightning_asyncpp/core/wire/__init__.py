"""Messages between neighbouring stages: headers, activations and their gradients, over sockets or NCCL."""

"""Asynchronous pipeline parallelism (PipeDream-2BW) for PyTorch Lightning and Fabric."""

"""Benchmarks of the pipeline: ``python -m research.benchmarks`` lists them."""

"""Callbacks for pipelines: throughput, traces, terminal output, and sampled text."""

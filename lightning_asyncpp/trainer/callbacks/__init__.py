"""Callbacks for pipelines: how busy they are, what they do when, what the model writes."""

"""Commands on saved models: ``asyncpp export``, ``import``, ``generate`` and ``evaluate``."""

"""Subcommands of LightningCLI: ``fit``, ``validate``, ``test`` and ``predict`` on YAML recipes."""

"""Lightning's part of the command: ``fit``, ``validate``, ``test`` and ``predict`` on YAML recipes."""

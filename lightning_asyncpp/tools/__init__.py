"""Command-line tools, each a subcommand of ``asyncpp``."""

"""The version of this package: the build, `asyncpp --version` and what runs record read it here."""

__version__ = "0.1.0"

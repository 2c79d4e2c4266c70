"""Version of this package, read by the build, by ``asyncpp --version`` and by records of runs."""

__version__ = "0.1.0"

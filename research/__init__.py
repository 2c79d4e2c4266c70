"""What the package's claims rest on: ablations, benchmarks and theory. It is not part of the installed package."""

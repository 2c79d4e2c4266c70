"""What benchmarks share: systems run in turn on processes of their own, and are compared."""

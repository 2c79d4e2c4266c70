"""Batches and their micro-batches: cut, weighed, told apart, and results put together again."""

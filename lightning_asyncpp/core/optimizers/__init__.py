"""Optimizers that somebody else wrote: what a pipeline must know of them before it trains with them."""

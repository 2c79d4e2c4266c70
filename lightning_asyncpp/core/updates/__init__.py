"""Updates: reduction of a mini-batch's gradient, agreement of all ranks, and the optimizer's step."""

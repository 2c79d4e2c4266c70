"""From a model to its stage: units, partition, what other stages hold, pruned."""

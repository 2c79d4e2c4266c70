"""From a model to its stage: units, partition, placeholders for what other stages hold."""

"""Cut of a model into stages: units, partition, and removal of other stages' layers."""

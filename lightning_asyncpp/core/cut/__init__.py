"""Cut of a model into stages: units (parts between two possible cuts), partition, removal of other stages' layers."""

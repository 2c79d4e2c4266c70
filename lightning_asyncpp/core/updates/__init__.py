"""The life of an update: a mini-batch's gradients, summed, agreed on, and applied with their hyper-parameters."""

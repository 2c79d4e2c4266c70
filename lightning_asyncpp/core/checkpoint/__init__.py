"""What a checkpoint of a pipeline holds: by names of the model, whatever the stages were that wrote it."""

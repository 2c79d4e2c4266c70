"""One micro-batch through one stage: forward with what arrives, backward with what comes back."""

"""Models of Hugging Face `transformers`: read, prepared for training, and their loss; nothing is imported before use."""

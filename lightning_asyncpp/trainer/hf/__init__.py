"""Models of Hugging Face `transformers`: read, prepared for training, and their loss; imported when used."""

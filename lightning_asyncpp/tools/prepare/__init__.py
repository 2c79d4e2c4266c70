"""``asyncpp prepare``: documents from the hub or from files to shards of tokens, resumable."""

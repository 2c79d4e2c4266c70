"""Checkpoints on disk: a file of ``torch.save``, or a folder of such files, one per stage; reading runs no code."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's package is imported; a name that is no folder fails at once

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # as it is imported: a name that is no folder is refused at once

"""`asyncpp bench`: the pipeline measured against its rivals, and timelines drawn."""

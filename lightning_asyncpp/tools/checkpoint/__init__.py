"""``asyncpp checkpoint``: what a checkpoint holds, and the same in another form."""

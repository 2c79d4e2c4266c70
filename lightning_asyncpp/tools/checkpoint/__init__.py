"""``asyncpp checkpoint``: what a checkpoint holds, whether it is whole, and the same in another form."""

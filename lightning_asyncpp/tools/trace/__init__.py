"""`asyncpp trace`: what a recorded pipeline did when, and where its time went."""

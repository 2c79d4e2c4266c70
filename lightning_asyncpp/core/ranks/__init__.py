"""How ranks meet: their places, process groups, connections, and what all of them agree on."""

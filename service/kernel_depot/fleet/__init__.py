"""The fleet: revisions that roll through it, the nodes, what each is to have, and warmups."""

"""What hangs off a client: one module for each noun, the sync and the async class next to each other."""

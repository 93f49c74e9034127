"""One execution: folder, steps, stops, saves and checkpoints."""

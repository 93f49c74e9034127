"""Before and around a run: what it would occupy, and how it gets onto other people's machines."""

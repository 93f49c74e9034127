"""Direct preference optimization."""

"""How a model and its rows are laid over ranks."""

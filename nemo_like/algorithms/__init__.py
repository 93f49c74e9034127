"""One readable file an algorithm, and what their runs share."""

"""One folder per algorithm, and what their runs share."""

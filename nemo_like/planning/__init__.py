"""Which resources a run takes, and whether a model fits its layout."""

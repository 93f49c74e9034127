"""Models that need no download: one in the package, one from PyPI, and folders of the user."""

"""Looking at runs: ``nemo-like show`` and ``report`` in a terminal, ``dashboard`` in a browser."""

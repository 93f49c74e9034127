"""Looking at runs: ``nemo-like show`` in a terminal, ``nemo-like dashboard`` in a browser."""

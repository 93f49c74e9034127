"""Runs programs that a model wrote, with limits, apart from everything else."""

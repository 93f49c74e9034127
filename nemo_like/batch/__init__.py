"""Rows of tokens without padding, and their distribution to ranks and micro-batches."""

"""Rows of tokens without padding, and how they are dealt to ranks and micro-batches."""

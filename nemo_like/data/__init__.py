"""Prompts: where rows come from, how they become token ids, and in which order they are used."""

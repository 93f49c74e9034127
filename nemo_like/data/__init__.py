"""Rows of prompts, conversations and pairs.

Where they come from, how they become token ids, and in which order they are used.
"""

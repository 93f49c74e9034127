"""Rewards of completions, computed in processes of their own."""

"""Pure functions of logprobs, rewards and batch, with one global denominator.

Only ``mismatch`` sums over ranks.
"""

"""Rewards for mathematics: the answer that a completion states, compared with the right one."""

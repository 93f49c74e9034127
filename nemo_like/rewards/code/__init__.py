"""Rewards for programs: they run against the row's tests."""

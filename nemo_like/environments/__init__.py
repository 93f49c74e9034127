"""Environments: what the policy talks to over several turns. Each runs in a reward process."""

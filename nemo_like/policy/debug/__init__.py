"""What ``policy.debug`` switches on: checks across ranks, profiles, and reports of hangs."""

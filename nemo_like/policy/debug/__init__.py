"""What ``policy.debug`` switches on: checks across ranks, and reports of hangs."""

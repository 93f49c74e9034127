"""What grades a completion: built-in verifiers, and the user's own reward function."""

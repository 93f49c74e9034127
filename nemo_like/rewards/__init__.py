"""What grades completions, in processes of its own."""

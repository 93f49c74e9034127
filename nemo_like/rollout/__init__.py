"""From prompts to graded trajectories, beside the engines; the driver gets references."""

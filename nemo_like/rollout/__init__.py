"""From prompts to scored trajectories, beside the engines; the driver gets references."""

"""PPO with a critic."""

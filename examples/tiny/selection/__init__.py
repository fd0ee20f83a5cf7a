"""Pre-PPO in miniature: selected against random prompts."""

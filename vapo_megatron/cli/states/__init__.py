"""The command states: trajectories become prompts for reinforcement learning on single steps."""

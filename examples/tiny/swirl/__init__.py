"""SWiRL on the tiny task: reinforcement learning on the steps of trajectories."""

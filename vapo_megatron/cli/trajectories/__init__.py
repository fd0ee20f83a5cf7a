"""`vapo trajectories`: samples episodes to be trained on later, or revises right responses."""

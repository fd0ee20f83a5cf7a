"""`vapo evaluate`: samples and judges a checkpoint on a file of problems."""

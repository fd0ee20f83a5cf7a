"""From a response to a verdict and a reward."""

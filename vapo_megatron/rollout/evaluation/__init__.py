"""Accuracy on held-out problems, during training and from the command line."""

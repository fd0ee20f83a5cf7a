"""Accuracy on held-out problems, in training and on its own."""

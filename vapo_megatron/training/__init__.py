"""The training loop with saving and stopping, one step as in the paper, and their set-up."""

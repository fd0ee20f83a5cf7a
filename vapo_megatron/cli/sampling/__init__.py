"""What evaluate, select and sample share: a checkpoint, its prompts, and responses in a file."""

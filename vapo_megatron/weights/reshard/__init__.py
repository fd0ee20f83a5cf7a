"""Weight sync: the trainer's live weights into the engine's; sends only what a rank is missing."""

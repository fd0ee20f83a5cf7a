"""Weight sync: the trainer's live weights into the sampler's; sends only what a rank is missing."""

"""The trainer's live weights into the sampler's, moving only what a rank lacks."""

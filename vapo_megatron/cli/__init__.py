"""What a user starts: train, launch, evaluate, prepare, preflight."""

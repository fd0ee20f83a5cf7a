"""What preflight.py checks, one subject a file."""

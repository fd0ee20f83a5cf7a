"""What a user starts: the command `vapo`, and the checks before a run."""

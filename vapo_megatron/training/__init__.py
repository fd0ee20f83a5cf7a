"""The training loop, one step of it, and what a run builds before its first."""

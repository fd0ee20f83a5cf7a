"""Runs code that may hang or lie: in worker processes that can be killed, or that only compute."""

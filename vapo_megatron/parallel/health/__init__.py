"""Heartbeats, watchdog, and early stop on preemption."""

"""Is every rank alive, and is there time left: heartbeats, watchdog, early stop."""

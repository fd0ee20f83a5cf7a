"""Is every rank alive, and is there time left: heartbeat, watchdog, early stop."""

"""`vapo benchmark`: parts of the package timed against plain counterparts."""

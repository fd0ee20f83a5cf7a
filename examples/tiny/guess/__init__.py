"""A game of GEM through the adapter: VAPO and methods without a critic."""

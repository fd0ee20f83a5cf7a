"""report.html: a run, or several compared, on one page without a network."""

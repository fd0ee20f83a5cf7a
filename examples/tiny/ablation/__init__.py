"""The paper's table 1 in miniature."""

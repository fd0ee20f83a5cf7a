"""Weights from and to Hugging Face files, by one name table."""

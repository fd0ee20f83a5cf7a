"""Bytes and seconds before launch, by arithmetic alone: nothing here loads torch."""

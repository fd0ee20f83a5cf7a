"""Problem files of many shapes into the parquet that training reads."""

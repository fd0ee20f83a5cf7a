"""Plans of memory and time, by arithmetic alone: nothing here loads torch or needs a GPU."""

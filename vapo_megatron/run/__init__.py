"""What a run writes, and reads back: rows, token records, checkpoints, its report."""

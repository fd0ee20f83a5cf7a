"""Where a value model pays: locks and keys."""

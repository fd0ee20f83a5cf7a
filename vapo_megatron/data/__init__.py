"""Problems, responses, batches and their columns, packing, atomic storage."""

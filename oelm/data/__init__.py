"""From a corpus to a checked dataset, and from a dataset to batches."""

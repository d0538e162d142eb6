"""Numbers that others published, as quoted."""

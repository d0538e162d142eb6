"""Training one run: loop, optimizer, checkpoint, parallel, record."""

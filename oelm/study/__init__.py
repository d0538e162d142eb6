"""Studies: plan, check, queue, engines, status."""

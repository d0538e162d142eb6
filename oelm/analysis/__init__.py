"""Read run folders, decide claims, write the report. Never imports torch."""

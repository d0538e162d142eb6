"""The pages a report is poured into."""

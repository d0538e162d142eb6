"""The studies that ship, as YAML."""

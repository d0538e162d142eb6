"""Hugging Face: convert any model, export and import ours, classification."""

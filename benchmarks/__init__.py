"""Speed, memory and preparation, side by side with peers. `python -m benchmarks` runs them all."""

"""Evaluation beside the peers': the loss of 4,096 tokens at a time, without gradients.

python -m benchmarks.evaluation [--workload nano] [--rounds 20] [--json FILE]

Contenders, turns and ratios are those of `benchmarks.train`, as is the look at their losses before
anything is timed. Ours is the pass that the training loop evaluates with; the peers run in torch's
inference mode.
"""

from benchmarks.train import main

if __name__ == "__main__":
    main(__doc__, evaluation=True)

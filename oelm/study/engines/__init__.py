"""Where runs are carried out: this machine, or Slurm."""

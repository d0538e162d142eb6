"""`make bench`: every benchmark in turn, each in a process of its own. Run it with nothing else running."""

import argparse
import subprocess
import sys
from pathlib import Path

argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__).parse_args()
for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    if path.stem == "peers":
        continue
    print(f"\n== {path.stem}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{path.stem}"], check=True)

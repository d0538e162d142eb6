"""How long a report takes: 30 runs × 1,000 evaluations, as a page. `python -m benchmarks.report`."""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "analysis"))
from synthetic import write_study

FORMATS = ("html", "md", "pdf")


def measure(folder: Path, out: Path, name: str, home: Path) -> dict[str, float]:
    """Seconds of a whole `oelm report` process, and the size of what it wrote."""
    command = [
        sys.executable,
        "-m",
        "oelm",
        "report",
        str(folder),
        "--format",
        name,
        "--out",
        str(out),
    ]
    env = {"XDG_CACHE_HOME": str(home), "HOME": str(home), "PATH": ""}
    began, cpu = time.perf_counter(), _cpu()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": _cpu() - cpu,  # what it would take if nobody else computed
        "bytes": (out / f"report.{name}").stat().st_size,
    }


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        folder = write_study(root, seeds=(0, 1, 2, 3, 4), steps=10_000, evals=1_000, logs=1_000)
        # The first report of an installation also bundles the page's libraries.
        for label, name in (("html, first", "html"), *((f, f) for f in FORMATS)):
            results[label] = measure(folder, root / "out", name, root / "home")
    if options.json:
        print(json.dumps(results, indent=1))
        return
    print("6 arms × 5 seeds × 1,000 evaluations and 1,000 training lines")
    for label, r in results.items():
        print(
            f"{label:<12} {r['seconds']:6.1f} s ({r['cpu_seconds']:.1f} s of CPU) {r['bytes'] / 1e6:6.2f} MB"
        )


if __name__ == "__main__":
    main()

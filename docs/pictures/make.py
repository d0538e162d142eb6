"""Take the documentation's pictures of a report: `python docs/pictures/make.py runs/quickstart`.

Needs Chromium, poppler-utils and a font like those that people have:
`apt-get install chromium poppler-utils fonts-inter`.
"""

import base64
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "analysis"))
from browser import Browser  # noqa: E402

FONT = """addEventListener("DOMContentLoaded", () => {
  const root = document.documentElement;
  if (root.lang == "en") root.style.setProperty("--font", "Inter");
});"""
# name: language, width, height, dark, and the chart to scroll to
SCREENS = {
    "quickstart": ("en", 1000, 1040, False, None),
    "curves": ("en", 1000, 860, False, "val"),
    "dark": ("en", 1000, 860, True, "gap"),
    "phone": ("en", 390, 800, False, None),
    "chinese": ("zh", 1000, 860, False, None),
}


def main(study: str) -> None:
    """Write each picture beside this file."""
    with tempfile.TemporaryDirectory() as place:
        for language, formats in (("en", "html,pdf"), ("zh", "html")):
            out = ["--format", formats, "--lang", language, "--out", f"{place}/{language}"]
            subprocess.run([sys.executable, "-m", "oelm", "report", study, *out], check=True)
        with Browser() as browser:
            browser.call("Page.addScriptToEvaluateOnNewDocument", source=FONT)
            for name, (language, width, height, dark, chart) in SCREENS.items():
                page = Path(place) / language / "report.html"
                browser.open(page, width=width, height=height, dark=dark)
                browser.run("new Promise(done => setTimeout(done, 3000))")
                if chart:
                    browser.show(f"[data-chart={chart}]")
                    browser.run(
                        f"document.querySelector('#fig-{chart}').scrollIntoView({{behavior: 'instant'}})"
                    )
                    browser.run("new Promise(done => setTimeout(done, 3000))")
                    if not dark:
                        box = browser.run(
                            f"document.querySelector('[data-chart={chart}]').getBoundingClientRect().toJSON()"
                        )
                        browser.point(box["x"] + box["width"] * 0.62, box["y"] + 150)
                        browser.wait("!!document.querySelector('#vg-tooltip-element.visible')")
                shot = browser.call("Page.captureScreenshot", format="png")
                (HERE / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))
        paper = f"{place}/en/report.pdf"
        command = [
            "pdftoppm",
            "-r",
            "70",
            "-png",
            "-f",
            "1",
            "-l",
            "1",
            "-singlefile",
            paper,
            str(HERE / "paper"),
        ]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main(sys.argv[1])

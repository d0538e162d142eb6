"""The built wheel, installed where there is no checkout, is the whole product."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(build, check=True, capture_output=True)
    (path,) = folder.glob("oelm-*.whl")
    return path


def new_environment(folder):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def install(python, *what):
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, *what], check=True, capture_output=True)


def check_it_works(python, folder):
    """Audit and list with the installed command, away from the checkout."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = [str(python.with_name("oelm")), "diagnose", "--model", "nano,n_layers=1"]
    done = subprocess.run(
        command, cwd=folder, env=clean, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["verdict: pass"], done.stderr
    code = (
        "import oelm, importlib.resources as r;"
        "print(oelm.__file__); print((r.files('oelm.studies') / 'quickstart.yaml').is_file())"
    )
    found = subprocess.check_output([str(python), "-c", code], cwd=folder, env=clean, text=True)
    place, shipped = found.split()
    assert Path(place).is_relative_to(folder)
    assert shipped == "True"


def test_every_module_and_data_file_is_in_it(wheel):
    tracked = subprocess.check_output(["git", "ls-files", "oelm", "studies"], cwd=ROOT, text=True)
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = {n if n.startswith("oelm/") else f"oelm/{n}" for n in tracked.splitlines()}
    assert expected - inside == set()


def test_it_works_installed_beside_its_dependencies(wheel, tmp_path):
    python = new_environment(tmp_path / "env")
    install(python, "--no-deps", str(wheel))
    # The dependencies are those of this environment; its own editable checkout is not among them.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "env" / "lib" / version / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    check_it_works(python, tmp_path)


@pytest.mark.slow
def test_it_works_in_an_empty_environment(wheel, tmp_path):
    python = new_environment(tmp_path / "env")
    pinned = (ROOT / "constraints.txt").read_text()
    install(python, next(line for line in pinned.splitlines() if line.startswith("torch==")))
    install(python, "-c", str(ROOT / "constraints.txt"), str(wheel))
    check_it_works(python, tmp_path)

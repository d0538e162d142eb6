import pytest


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A data folder of the test's own."""
    folder = tmp_path / "home"
    monkeypatch.setenv("OELM_HOME", str(folder))
    return folder / "datasets"

import pytest
from synthetic import write_run, write_study

from oelm.analysis import report
from oelm.analysis.document import document
from oelm.analysis.sources import read_study
from oelm.analysis.words import Words

pytest.importorskip("websockets", reason="drives the browser; in the dev extra")
import browser

pytestmark = pytest.mark.skipif(
    browser.PROGRAM is None,
    reason="no Chromium: apt-get install -y --no-install-recommends chromium",
)
LINES = "document.querySelectorAll('[data-chart={0}] .mark-line path').length"


@pytest.fixture(scope="module")
def chrome():
    with browser.Browser() as running:
        yield running


@pytest.fixture(scope="module")
def page(study_folder, tmp_path_factory):
    doc = document([read_study(study_folder)], Words("en"))
    return report.write(doc, tmp_path_factory.mktemp("page"), ["html"])[0]


def hover(chrome, chart):
    box = chrome.show(f"[data-chart={chart}]")
    chrome.point(box["x"] + box["width"] / 2, box["y"] + 100)
    chrome.wait("!!document.querySelector('#vg-tooltip-element.visible')")
    return chrome.run("document.querySelector('#vg-tooltip-element').innerText")


def test_the_page_works_from_disk_with_the_network_off(chrome, page):
    chrome.events.clear()
    chrome.open(page)
    chrome.show("[data-chart=val]")
    assert chrome.run(LINES.format("val")) == 6

    tooltip = hover(chrome, "val")
    for arm in ("step", "baseline", "frozen", "lowrank"):
        assert arm in tooltip
    # The step pointed at is marked in the neighbouring chart as well.
    marked = (
        "document.querySelectorAll('[data-chart=gap] .mark-rule line[stroke=\"#8A8F98\"]').length"
    )
    chrome.wait(f"{marked} == 2")

    chrome.run("document.querySelector('.chip[title=frozen]').click()")
    chrome.wait(f"{LINES.format('val')} == 5")
    assert chrome.run(LINES.format("gap")) == 4
    assert "frozen" in chrome.run("document.querySelector('.chip[aria-pressed=false]').innerText")
    # A chart drawn later knows it too, and so does one redrawn in the other theme.
    chrome.show("[data-chart=train]")
    assert chrome.run(LINES.format("train")) == 5
    chrome.run("document.querySelector('#theme').click()")
    chrome.wait(f"document.documentElement.dataset.theme == 'dark' && {LINES.format('train')} == 5")
    chrome.run("document.querySelector('.chip[title=frozen]').click()")
    chrome.wait(f"{LINES.format('val')} == 6")
    chrome.run("sessionStorage.clear()")  # forgets the theme chosen

    assert chrome.complaints() == []
    assert set(chrome.requests()) == {page.resolve().as_uri()}


@pytest.mark.parametrize(("width", "dark"), [(1100, True), (390, False)])
def test_nothing_runs_out_of_the_page(chrome, page, width, dark):
    chrome.events.clear()
    chrome.open(page, width=width, dark=dark)
    for chart in ("forest", "val", "gap", "train", "parts", "step", "scatter", "layers"):
        box = chrome.show(f"[data-chart={chart}]")
        drawn = chrome.run(
            f"document.querySelector('[data-chart={chart}] svg').getBoundingClientRect().toJSON()"
        )
        assert drawn["right"] <= box["right"] + 1, chart
    assert chrome.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert chrome.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    assert chrome.complaints() == []


def test_a_chinese_page_uses_its_own_font(chrome, study_folder, tmp_path):
    doc = document([read_study(study_folder)], Words("zh"))
    (path,) = report.write(doc, tmp_path, ["html"])
    chrome.events.clear()
    chrome.open(path)
    assert chrome.run("document.querySelector('h2').innerText") == "主张与判定"
    assert chrome.run(
        "document.fonts.ready.then(f => [...f].some(x => x.family.includes('Oelm') && x.status == 'loaded'))"
    )
    assert "步数" in hover(chrome, "val")
    assert chrome.complaints() == []


def test_names_that_look_like_markup_stay_names(chrome, tmp_path):
    nasty = "<img src=x onerror=alert(1)>"
    arms = {
        "baseline": ("baseline", 42.0),
        nasty: ("oelm_v2", 46.0),
        'a"b.c[0]': ("oelm_gain", 45.0),
    }
    folder = write_study(
        tmp_path, arms=arms, seeds=(0, 1), question="</script><script>alert(2)</script>"
    )
    write_run(folder / "baseline" / "seed-1", seed=1, state="running")
    (path,) = report.write(document([read_study(folder)], Words("en")), tmp_path, ["html"])
    chrome.events.clear()
    chrome.open(path)
    tooltip = hover(chrome, "val")
    assert nasty in tooltip
    assert 'a"b.c[0]' in tooltip
    assert not [e for e in chrome.events if e.get("method") == "Page.javascriptDialogOpening"]
    assert chrome.complaints() == []

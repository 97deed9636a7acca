"""The page as Chromium shows it. Skipped where there is no Chromium, no Playwright or no drawing library."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from run_files import run, sweep

from jrl.report import content, page, runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(page.library() is None, reason=f"no drawing library: {page.INSTALL}"),
]
BAD = "</script><b>bold</b><img src=x onerror=alert(1)>"
METHODS = 4  # those of the config file, and BAD
KIND = "<img src=x onerror=alert(2)>"  # a value of a config


@pytest.fixture(scope="module")
def runs_of_a_sweep(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    for i, lr in enumerate((1e-2, 1e-3, 1e-4)):
        for seed in range(2):
            run(
                directory / f"{i}{seed}",
                seed=seed,
                values=(1 + seed, 60, 100 * i + seed),
                lr=lr,
                clip_eps=0.1 * (1 + seed),
                kind=f"{KIND}{seed}",
            )
    file = directory / "00" / "result.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [{**row, "time/env": 1.5, "evaluation/returns": [1.0, 2.0, 2.0]} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    others = directory / "others.csv"
    others.write_text(f"method,task,seed,step,value\n{BAD},CartPole-v1,0,100,1\n{BAD},CartPole-v1,0,300,2\n")
    return directory, others


def write(places, directory):
    """Writes the page of runs; returns its address."""
    found = runs.read(places, ["algo.lr"])
    said = content.content(found, content.ReportOptions())
    file = directory / page.NAME
    file.write_text(page.html(found, said, content.ReportOptions(), directory, page.library()))
    return file.as_uri()


@pytest.fixture
def tab(browser):
    """A tab; at the end of the test it had no error, and had asked for nothing from elsewhere."""
    opened = browser.new_page(viewport={"width": 1200, "height": 800})
    opened.set_default_timeout(15_000)
    wrong = []
    opened.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("dialog", lambda dialog: wrong.append(dialog.message))
    own = ("file:", "data:", "blob:")
    opened.on("request", lambda asked: None if asked.url.startswith(own) else wrong.append(asked.url))
    yield opened
    opened.close()
    assert wrong == []


@pytest.fixture
def opened(tab, runs_of_a_sweep, tmp_path):
    tab.goto(write(runs_of_a_sweep, tmp_path))
    tab.wait_for_selector("#curves svg")
    return tab


def lines(tab):
    return tab.locator("#curves svg path").count()


def column(tab, name):
    at = tab.locator("#run-table th").all_inner_texts().index(name)
    return tab.locator(f"#run-table tbody tr:not([hidden]) td:nth-child({at + 1})").all_inner_texts()


def test_the_legend_switches_methods(opened):
    buttons = opened.locator("#legend [data-name]")
    assert buttons.count() == METHODS and opened.locator('#legend [aria-pressed="true"]').count() == METHODS
    before = lines(opened)
    buttons.first.click()
    assert buttons.first.get_attribute("aria-pressed") == "false" and lines(opened) < before
    opened.keyboard.press("Space")  # the focus is still there
    assert buttons.first.get_attribute("aria-pressed") == "true" and lines(opened) == before
    opened.get_by_role("button", name="none", exact=True).click()
    assert opened.locator('#legend [aria-pressed="true"]').count() == 0 and lines(opened) < before
    buttons.nth(1).click(modifiers=["Alt"])  # shows this method alone
    assert buttons.evaluate_all("found => found.map((b) => b.ariaPressed)") == ["false", "true", "false", "false"]
    opened.get_by_role("button", name="all", exact=True).click()
    assert opened.locator('#legend [aria-pressed="true"]').count() == METHODS


def test_a_control_changes_the_axis(opened):
    text = opened.locator("#curves svg")
    assert "environment steps" in text.inner_html()
    opened.locator("[data-choice=axis]").select_option("time_s")
    assert "seconds of training" in text.inner_html()


def test_the_table_sorts_and_filters(opened):
    assert column(opened, "last") == ["201", "200", "101", "100", "2", "1", "0"]
    assert opened.locator('#run-table [aria-sort="descending"]').inner_text() == "last"
    opened.get_by_role("button", name="last", exact=True).click()
    assert column(opened, "last") == ["0", "1", "2", "100", "101", "200", "201"]
    opened.keyboard.press("Enter")
    assert column(opened, "last")[0] == "201"
    opened.locator("#filter").fill("lr<0.005 last>100")
    assert column(opened, "last") == ["201", "200", "101"]
    assert opened.locator("#run-note").inner_text() == "3 of 7 runs"
    opened.locator("#filter").fill("no such run")
    assert column(opened, "last") == []


def test_the_parts_beside_the_curves(opened):
    assert "env" in opened.locator("#time svg").inner_html()
    assert "algo.clip_eps" in opened.locator("#differences").inner_text()
    histograms = opened.locator("#histograms")
    assert "evaluation/returns" in histograms.inner_html() and histograms.locator("svg path").count() > 0
    links = opened.locator("#run-table a").evaluate_all("found => found.map((a) => a.getAttribute('href'))")
    assert len(links) == 6 and all(link.endswith("/") for link in links)
    places = set()
    for _ in range(60):
        opened.keyboard.press("Tab")
        places.add(opened.evaluate("document.activeElement.closest('[id]')?.id"))
    assert {"legend", "filter", "run-table"} <= places


def test_names_of_others_are_texts(opened):
    """Also in tooltips, which ECharts writes as HTML: the pointer visits every chart in a grid of points."""
    assert BAD in opened.locator("#legend").inner_text() and BAD in opened.locator("#scores").inner_text()
    seen = set()
    for choice in opened.locator("[data-choice=map0] option").evaluate_all("found => found.map((o) => o.value)"):
        opened.locator("[data-choice=map0]").select_option(choice)
        for chart in opened.locator(".chart").all():
            if choice != "algo.kind over algo.lr" and chart.get_attribute("id") != "map-0":
                continue
            chart.scroll_into_view_if_needed()
            box = chart.bounding_box()
            for x in range(1, 12):
                for y in (0.2, 0.35, 0.5, 0.65):
                    opened.mouse.move(box["x"] + x / 12 * box["width"], box["y"] + y * box["height"])
                    seen |= {*chart.locator("xpath=./div[2]").all_inner_texts()}
    told = "\n".join(seen)
    assert BAD in told and KIND in told and len(seen) > 10
    assert opened.locator("img").count() == 0 and opened.locator("b:text-is('bold')").count() == 0


def test_an_axis_of_the_sweep_chooses_lines(opened):
    chart = opened.locator("#parallel-0")
    chart.scroll_into_view_if_needed()
    faint = chart.locator("path[stroke-opacity='0.04']")
    assert faint.count() == 0
    box = chart.bounding_box()
    # the score's axis is the last; its upper third
    x, top = box["x"] + box["width"] - 66, box["y"] + 36
    opened.mouse.move(x, top)
    opened.mouse.down()
    opened.mouse.move(x, top + 60, steps=4)
    opened.mouse.up()
    assert faint.count() == 4  # of six runs two have 200 and more


def test_a_control_changes_the_map(opened):
    chart = opened.locator("#map-0 svg")
    opened.locator("[data-choice=map0]").select_option("algo.clip_eps over algo.lr")
    assert chart.locator("text", has_text="201").count() >= 1
    opened.locator("[data-choice=map0]").select_option("score over algo.lr")
    assert chart.locator("text", has_text="algo.lr").count() == 1 and "score" in chart.inner_html()


def test_a_sweep_whose_scheduler_stopped_members(tab, tmp_path):
    directory = sweep(tmp_path / "asha", lengths=(1, 2, 3), copies=[("02", "00")])
    tab.goto(write([directory], tmp_path))
    assert "after 100 env_steps" in tab.locator("#sweep").inner_text()
    points = tab.locator("#map-0 svg").inner_html()
    assert ">30<" in points and ">302<" not in points  # the axis of scores: those at equal steps
    assert column(tab, "last") == ["302", "201", "30"] and column(tab, "copied from")[0] == "00"
    assert column(tab, "state") == ["finished", *["stopped by the scheduler"] * 2]
    assert tab.locator("#run-table .bad").count() == 0 and tab.locator("#failures").count() == 0


@pytest.mark.parametrize("scheme, ground", [("light", 255), ("dark", 0)])
def test_on_a_phone_by_day_and_by_night(opened, scheme, ground):
    opened.set_viewport_size({"width": 390, "height": 800})
    opened.emulate_media(color_scheme=scheme)
    # the charts take the new width when the browser comes to it; asked from here, since the page's policy forbids the
    # eval by which Playwright would ask again
    for _ in range(200):
        if (width := opened.evaluate("document.documentElement.scrollWidth")) == 390:
            break
        opened.wait_for_timeout(50)
    assert width == 390
    color = opened.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert all(abs(part - ground) < 40 for part in color)
    size = opened.evaluate("document.querySelector('#curves svg').getBoundingClientRect().width")
    assert 250 < size < 390
    # a picture of it has the line of every method
    image = Image.open(io.BytesIO(opened.locator("#curves").screenshot())).convert("RGB")
    pixels = np.asarray(image, np.int32).reshape(-1, 3)
    colors = opened.evaluate("data.charts.curves[0].option.series.map((series) => series.itemStyle.color)")
    assert len({*colors}) == METHODS
    for drawn in colors:
        own = [int(drawn[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels - own).max(1) < 20).sum() > 20, drawn


def test_printed_it_is_as_wide_as_the_paper_and_light(opened):
    opened.emulate_media(color_scheme="dark")
    shown = """() => {
      const svg = document.querySelector("#curves svg"), box = svg.getBBox();
      return { width: svg.getBoundingClientRect().width, drawn: box.x + box.width };
    }"""
    opened.evaluate("document.querySelector('details.cautions').open = false")
    before = opened.evaluate(shown)
    # at once: the paper does not wait for a frame
    after = opened.evaluate(f"dispatchEvent(new Event('beforeprint')) && ({shown})()")
    assert after["width"] <= 680 < before["width"] and after["drawn"] <= 690 < before["drawn"]
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]") > 200
    assert opened.locator("details.cautions li").first.is_visible()
    opened.evaluate("dispatchEvent(new Event('afterprint'))")
    assert opened.evaluate(shown)["width"] == before["width"]
    assert opened.pdf()[:4] == b"%PDF"

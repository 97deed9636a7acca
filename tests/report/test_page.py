"""The page without a browser: what is in it, what is not, and how large it is."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from run_files import run

from jrl.report import __main__, charts, content, page, runs
from jrl.report.content import ReportOptions

BAD = "</script><b>&\"'"
LIBRARY = "var echarts = {text: '</script><!--'};"


@pytest.fixture
def found(tmp_path):
    for lr in (1e-2, 1e-3, 1e-4):
        for seed in range(2):
            run(tmp_path / f"{lr}-{seed}", seed=seed, values=(1 + seed, 60, 1e4 * lr + seed), lr=lr)
    others = tmp_path / "others.csv"
    quoted = '"' + BAD.replace('"', '""') + '"'
    lines = [f"{quoted},CartPole-v1,{seed},{step},{seed + step}\n" for seed in range(2) for step in (100, 300)]
    others.write_text("method,task,seed,step,value\n" + "".join(lines))
    return runs.read([tmp_path, others])


def shown(found, directory, **asked):
    options = ReportOptions(**asked)
    said = content.content(found, options)
    return page.html(found, said, options, directory, LIBRARY)


class Elements(HTMLParser):
    """The elements of a page with their attributes, the text of scripts, and the texts of all else."""

    def __init__(self, text):
        super().__init__()
        self.found, self.scripts, self.texts, self._inside = [], [], [], False
        self.feed(text)
        self.data = json.loads(self.scripts[0])["charts"]

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        self._inside = tag == "script"

    def handle_endtag(self, tag):
        self._inside &= tag != "script"

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1] += data
        else:
            self.texts.append(data.strip())

    def all(self, tag, name):
        return [attrs[name] for found, attrs in self.found if found == tag and name in attrs]


def test_names_are_no_tags_and_nothing_is_fetched(found, tmp_path):
    text = shown(found, tmp_path)
    parsed = Elements(text)
    _, library, code = parsed.scripts
    assert BAD not in text and "\\x3c/script>\\x3c!--" in library and "echarts.init" in code
    assert BAD in parsed.texts and BAD in parsed.all("button", "data-name") and BAD in parsed.all("tr", "title")
    assert BAD in {series["name"] for view in parsed.data["curves"] for series in view["option"]["series"]}
    # the only bold texts are numbers, labels and bars of the page's own
    assert {attrs.get("style", "")[:5] for tag, attrs in parsed.found if tag == "b"} <= {"", "left:", "width"}
    links = [
        link
        for name in ("src", "href")
        for tag in ("a", "link", "img", "script", "video")
        for link in parsed.all(tag, name)
    ]
    assert all(link.startswith("#") or link == "data:," or (tmp_path / link).is_dir() for link in links)
    assert {*re.findall(r"https?://[^\s\"']+", text)} == set()
    assert "@import" not in text and "url(" not in text
    # only the page's own scripts run
    (policy,) = [attrs["content"] for tag, attrs in parsed.found if tag == "meta" and "http-equiv" in attrs]
    assert policy.startswith("default-src 'none'") and "http" not in policy
    (allowed,) = re.findall(r"script-src ([^;]*);", policy)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in parsed.scripts[1:]]
    assert allowed.split() == [f"'sha256-{found}'" for found in hashes]


@pytest.mark.slow
def test_many_long_runs_fit_and_the_best_are_shown(found, tmp_path):
    (one,) = [run for run in found.runs if run.name.endswith("0.01-1")]
    x = np.arange(400)
    rows = [{"env_steps": 100 * (i + 1), "evaluation/return": value} for i, value in enumerate(np.sin(x / 7).tolist())]
    several = [one._replace(name=f"x/{i}", method=f"m{i % 40}", rows=rows[: 300 + i % 7]) for i in range(120)]
    many = [
        one._replace(name=f"y/{i}", method=f"n{i}", rows=[{"env_steps": 1, "evaluation/return": i}]) for i in range(400)
    ]
    for given, code, sizes in ((several, 1_150_000, {120}), (many, 1_700_000, {300, 100})):
        given = runs.Found(given, [])
        said = content.content(given, ReportOptions())
        text = page.html(given, said, ReportOptions(), tmp_path, "x" * code)
        assert len(text.encode()) < page.LIMIT
        parsed = Elements(text)
        lines = parsed.all("tr", "title")
        assert len(lines) in sizes and f"{len(lines)} of {len(given.runs)} runs" in parsed.texts
        assert len(parsed.data["curves"][0]["option"]["series"]) >= 50
    best = [f"n{i}" for i in range(399, 399 - len(lines), -1)]
    assert lines == best and any(f"the best {len(lines):,}" in line for line in parsed.texts)
    assert parsed.all("button", "aria-pressed") == ["true"] * 10 + ["false"] * 40


def test_curves_over_every_axis(found, tmp_path):
    def of_axes(axis):
        text, views = shown(found, tmp_path, axis=axis), {}
        assert f'<option value="{axis}" selected>' in text and text.count(" selected>") == 1
        for view in Elements(text).data["curves"]:
            own = views.setdefault(view["axis"], {})
            for series in view["option"]["series"]:
                own.setdefault(series["name"], []).append(series)
        return views

    views = of_axes("env_steps")
    assert [*views] == ["env_steps", "updates", "time_s"]
    for axis, ends in (("env_steps", (100, 300)), ("updates", (10, 30)), ("time_s", (0.5, 1.5))):
        band, mean, first, second = views[axis]["lr=0.01"]
        assert (band["type"], band["renderItem"], mean["type"]) == ("custom", "band", "line")
        assert mean["data"][0] == [ends[0], 1.5] and mean["data"][-1] == [ends[1], 100.5]
        assert band["data"][-1] == [ends[1], 100, 101]
        assert [line["data"][0] for line in (first, second)] == [[ends[0], 1], [ends[0], 2]]
        assert [line["data"][-1] for line in (first, second)] == [[ends[1], 100], [ends[1], 101]]
    assert BAD in views["env_steps"] and BAD not in views["updates"]  # its rows have none
    by_time = of_axes("time_s")
    for axis in ("updates", "time_s"):
        data = [[series["data"] for series in own[axis]["lr=0.001"]] for own in (views, by_time)]
        assert data[0] == data[1]


def test_parts_beside_the_curves(found, tmp_path):
    directory = found.runs[0].path
    (directory / "videos").mkdir()
    for name in ("5000.mp4", "100000.mp4", "100.unfinished.mp4"):
        (directory / "videos" / name).touch()
    lists = [{"hist/poles": [0.5, 1.5]}, {"hist/poles": [2.5, float("nan")]}, {}]
    more = [
        {**row, "time/env": 0.25, "time/log": 0.0, "policy/entropy": i, **own}
        for i, (row, own) in enumerate(zip(found.runs[0].rows, lists, strict=True))
    ]
    found = found._replace(runs=[found.runs[0]._replace(rows=more), *found.runs[1:]])
    parsed = Elements(shown(found, tmp_path / "a page"))
    assert parsed.all("video", "src") == [f"../{directory.name}/videos/100000.mp4"]
    links = parsed.all("a", "href")
    assert f"../{directory.name}/" in links and f"../{directory.name}/videos/5000.mp4" in links
    assert not [link for link in links if "unfinished" in link]
    ((histogram,),) = [views for name, views in parsed.data.items() if name.startswith("histogram-")]
    (line,) = histogram["option"]["series"]
    assert histogram["option"]["title"]["text"] == "hist/poles"
    assert (line["data"][0][0], line["data"][-1]) == (0.5, [2.5, 0]) and sum(n for _, n in line["data"]) == 3
    (time,) = parsed.data["time"]
    assert {series["name"]: series["data"] for series in time["option"]["series"]} == {"env": [0.375], "rest": [1.125]}
    ((inside,),) = [views for name, views in parsed.data.items() if name.startswith("inside-")]
    assert inside["option"]["series"][0]["data"] == [[100, 0], [200, 1], [300, 2]]


def test_hyper_parameters(found, tmp_path):
    data = Elements(shown(found, tmp_path)).data
    (lines,) = data["parallel-0"]
    option = lines["option"]["baseOption"]
    assert [axis["name"] for axis in option["parallelAxis"]] == ["lr", "score"]
    assert option["parallelAxis"][0]["type"] == "log" and option["series"][0]["data"][-1] == [0.01, 101]
    (scatter,) = data["map-0"]
    assert scatter["map0"] == "score over algo.lr"
    assert scatter["option"]["series"][1]["data"] == [[0.0001, 1.5], [0.001, 10.5], [0.01, 100.5]]


def test_a_map_of_two_hyper_parameters_has_means():
    given = charts.Swept("task", ["a", "b"], {"a": [1, 1, 2], "b": ["x", "x", "y"]}, np.array([10.0, 20.0, 7.0]))
    pair, *_ = charts.draw_score_maps([given], "map0")
    (series,) = pair["option"]["series"]
    assert pair["map0"] == "b over a" and [cell["value"] for cell in series["data"]] == [
        ["1", "x", 15, 2],
        ["2", "y", 7, 1],
    ]
    many = [0.97 + i / 2000 for i in range(40)]  # more values than have a cell each: parts of their range
    given = charts.Swept("task", ["a", "b"], {"a": many, "b": many}, np.arange(40.0))
    names = charts.draw_score_maps([given], "map0")[0]["option"]["xAxis"]["data"]
    assert len(names) == len({*names}) == 12
    with_text = charts.Swept("task", ["a"], {"a": ["x", 1.0, 2.0]}, np.arange(3.0))
    assert charts.draw_score_maps([with_text], "m")[0]["option"]["xAxis"]["data"] == ["1.0", "2.0", "x"]


def test_the_command_says_what_the_page_needs(found, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(page, "library", lambda: None)
    asked = [str(run.path) for run in found.runs if run.path] + ["--out", str(tmp_path / "out")]
    assert __main__.main(asked) == 0
    assert page.INSTALL in capsys.readouterr().out and not (tmp_path / "out" / page.NAME).exists()
    monkeypatch.setattr(page, "library", lambda: LIBRARY)
    assert __main__.main(asked) == 0 and str(tmp_path / "out" / page.NAME) in capsys.readouterr().out
    assert (tmp_path / "out" / page.NAME).read_text().startswith("<!doctype html>")

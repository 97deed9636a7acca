"""The page without a browser: what is in it, what is not, and how large it is."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from run_files import run

from jrl.report import __main__, content, page, page_data, runs
from jrl.report.content import Options

BAD = "</script><b>&"
LIBRARY = "var echarts = {text: '</script><!--'};"


@pytest.fixture
def found(tmp_path):
    for lr in (1e-2, 1e-3, 1e-4):
        for seed in range(2):
            run(tmp_path / f"{lr}-{seed}", seed=seed, values=(1 + seed, 60, 1e4 * lr + seed), lr=lr)
    others = tmp_path / "others.csv"
    lines = [f"{BAD},CartPole-v1,{seed},{step},{seed + step}\n" for seed in range(2) for step in (100, 300)]
    others.write_text("method,task,seed,step,value\n" + "".join(lines))
    return runs.read([tmp_path, others])


def shown(found, directory, **asked):
    options = Options(**asked)
    said = content.content(found, options)
    return page_data.data(found, said, options, page_data.relative(directory))


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text of scripts."""

    def __init__(self):
        super().__init__()
        self.found, self.scripts, self._inside = [], [], False

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
            self._inside = True

    def handle_endtag(self, tag):
        self._inside &= tag != "script"

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1] += data


def test_names_are_no_tags_and_nothing_is_fetched(found, tmp_path):
    data = shown(found, tmp_path)
    text = page.html(data, LIBRARY)
    parsed = Elements()
    parsed.feed(text)
    inside, library, code = parsed.scripts
    assert json.loads(inside)["methods"] == data["methods"] and BAD in data["methods"]
    assert BAD not in text and "\\x3c/script>\\x3c!--" in library and "follow" in code
    assert not [tag for tag, _ in parsed.found if tag == "b"]
    links = [attrs.get(name) for _, attrs in parsed.found for name in ("src", "href") if name in attrs]
    assert all(link.startswith("#") or link == "data:," for link in links)
    (policy,) = [attrs["content"] for tag, attrs in parsed.found if tag == "meta" and "http-equiv" in attrs]
    assert policy.startswith("default-src 'none'") and "http" not in policy
    assert {*re.findall(r"https?://[^\s\"']+", text)} == {"http://www.w3.org/2000/svg"}  # a name, which is not fetched
    assert "@import" not in text and "url(" not in text


def test_many_long_runs_fit():
    line = np.round(np.random.default_rng(0).normal(size=400), 6).tolist()
    numbers = {"y": line, "env_steps": line, "updates": line, "time_s": line}
    data = {
        "curves": [{"runs": [{"name": str(i), **numbers} for i in range(256)], "bands": {"env_steps": None}}],
        "over_tasks": {}, "inside": [],
    }  # fmt: skip
    library = "x" * 1_150_000
    assert len(page.html(data, library).encode()) < page.LIMIT
    few = json.loads(page.fitted(data, 1_000_000))
    assert 12 < few["points"] < 400 and few["curves"][0]["runs"][0]["y"][-1] == float(f"{line[-1]:.5g}")
    assert json.loads(page.fitted(data, 0))["curves"][0]["runs"] == []


def test_of_more_runs_than_fit_the_best_are_shown(found, tmp_path):
    data = shown(found, tmp_path)
    few = len(page.in_html(page_data.text(page_data.thinned(data, 0))).encode())
    (one,) = [run for run in data["runs"] if run["last"] == 101]
    names = [f"x/{i}" for i in range(4000)]
    more = [{**one, "name": name, "method": name, "last": i} for i, name in enumerate(names)]
    line = {"task": "CartPole-v1", "bands": {}}
    curves = [{**line, "method": name, "runs": [{"name": name}]} for name in names]
    failures = [{**one, "name": name, "why": "unfinished"} for name in names]
    many = {
        **data, "runs": [*data["runs"], *more], "methods": [*data["methods"], *names], "failures": failures,
        "cautions": names, "curves": [*data["curves"], *curves],
    }  # fmt: skip
    library = "x" * 1_150_000
    assert len(page_data.text(page_data.thinned(many, 0))) > page.LIMIT > len(page.html(many, library).encode())
    kept = json.loads(page.fitted(many, 700_000))
    lasts = sorted((run["last"] for run in many["runs"]), reverse=True)
    count = len(kept["runs"])
    assert 100 < count < 4000 and sorted((run["last"] for run in kept["runs"]), reverse=True) == lasts[:count]
    assert f"the best {count:,}" in kept["notes"][-1] and len(kept["cautions"]) == count + 1
    assert {c["method"] for c in kept["curves"]} == {*kept["methods"]} == {run["method"] for run in kept["runs"]}
    assert json.loads(page.fitted(data, few))["runs"] == data["runs"]  # what fits is whole


def test_a_run_over_every_axis(found, tmp_path):
    data = page_data.thinned(shown(found, tmp_path), 400)
    assert data["axes"] == ["env_steps", "updates", "time_s"]
    (curve,) = [c for c in data["curves"] if c["method"] == "algo.lr=0.01"]
    assert curve["runs"][1] == {
        "name": str(tmp_path / "0.01-1"), "y": [2, 60, 101], "env_steps": [100, 200, 300], "updates": [10, 20, 30],
        "time_s": [0.5, 1, 1.5],
    }  # fmt: skip
    for axis, end in (("env_steps", 300), ("updates", 30), ("time_s", 1.5)):
        band = curve["bands"][axis]
        assert (band["x"][-1], band["value"][-1]) == (end, 100.5) and band["low"][-1] < 100.5 < band["high"][-1]
    (other,) = [c for c in data["curves"] if c["method"] == BAD]
    assert other["bands"]["updates"] is None and other["runs"][0]["updates"] == [None, None]  # they have none
    assert other["bands"]["env_steps"]["value"][-1] == 300.5
    for by_time in shown(found, tmp_path, axis="time_s")["curves"]:
        (same,) = [c for c in shown(found, tmp_path)["curves"] if c["method"] == by_time["method"]]
        assert by_time["bands"] == same["bands"]


def test_what_lies_beside_the_rows(found, tmp_path):
    directory = found.runs[0].path
    (directory / "videos").mkdir()
    for name in ("5000.mp4", "100000.mp4", "100.unfinished.mp4"):
        (directory / "videos" / name).touch()
    lists = [{"hist/poles": [0.5, 1.5]}, {"hist/poles": [2.5, float("nan")]}, {}]
    more = [
        {**row, "time/env": 0.25, "time/log": 0.0, **own} for row, own in zip(found.runs[0].rows, lists, strict=True)
    ]
    found = found._replace(runs=[found.runs[0]._replace(rows=more), *found.runs[1:]])
    data = shown(found, tmp_path / "a page")
    own = data["runs"][0]
    assert own["link"] == f"../{directory.name}/" and own["seconds"] == {"env": 0.75}
    assert own["values"] == {"algo.lr": found.runs[0].config["algo.lr"]} and data["keys"] == {"ppo": ["algo.lr"]}
    assert own["videos"] == [
        {"name": name, "link": f"../{directory.name}/videos/{name}.mp4"} for name in ("5000", "100000")
    ]
    (histogram,) = data["histograms"]
    assert (histogram["name"], histogram["edges"][0], histogram["edges"][-1]) == ("hist/poles", 0.5, 2.5)
    assert [sum(counts) for counts in histogram["methods"].values()] == [3]
    (inside,) = [run for run in page_data.thinned(data, 400)["inside"] if run["name"] == own["name"]]
    assert inside["metrics"] == {}  # rows of the fixture have none that are drawn


def test_the_command_says_what_the_page_needs(found, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(page, "library", lambda: None)
    asked = [str(run.path) for run in found.runs if run.path] + ["--out", str(tmp_path / "out")]
    assert __main__.main(asked) == 0
    assert page.INSTALL in capsys.readouterr().out and not (tmp_path / "out" / page.NAME).exists()
    assert __main__.main([*asked, "--serve"]) == 2 and page.INSTALL in capsys.readouterr().err
    monkeypatch.setattr(page, "library", lambda: LIBRARY)
    assert __main__.main(asked) == 0 and str(tmp_path / "out" / page.NAME) in capsys.readouterr().out
    assert (tmp_path / "out" / page.NAME).read_text().startswith("<!doctype html>")

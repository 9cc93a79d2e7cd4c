"""Facts of a report, read from its sections, and pages as a browser reads them."""

import base64
import hashlib
import os
import shutil
import subprocess
from dataclasses import fields, is_dataclass
from html.parser import HTMLParser

import pytest

from megatron_vlm.report.charts import Chart, Charts, chart_data, chart_scripts, curve_summaries
from megatron_vlm.report.html import render_page
from megatron_vlm.report.sections import Heading, Table, Tiles


def walk(part):
    """Yield a section and all that it holds, in order, texts included."""
    yield part
    if is_dataclass(part):
        for field in fields(part):
            yield from walk(getattr(part, field.name))
    elif isinstance(part, (list, tuple)):
        for item in part:
            yield from walk(item)


class Facts:
    def __init__(self, report):
        self.report = report
        self.found = [*walk([report.title, report.lead, report.summary, report.sections])]
        self.words = [each for each in self.found if isinstance(each, str)]
        self.text = "\n".join(self.words)
        self.tiles = {name: figure for tiles in self.of(Tiles) for figure, name in tiles.items}
        self.rows = [tuple(row) for table in self.of(Table) for row in table.rows]
        self.names = [heading.name for heading in self.of(Heading) if heading.name]
        self.titles = [chart.title for chart in self.of(Chart)]

    def of(self, kind):
        return [each for each in self.found if isinstance(each, kind)]

    def chart(self, title):
        """Return the first chart with this title, as the page's script gets it."""
        group = next(g for g in self.of(Charts) if title in [c.title for c in g.charts])
        chart = next(chart for chart in group.charts if chart.title == title)
        return chart_data(chart, group.span)

    def summary(self, title):
        """Return the description in words of the first chart with this title: the values of each
        curve."""
        return dict(curve_summaries(next(c for c in self.of(Chart) if c.title == title)))

    def curves(self, title):
        return [(c["name"], c["x"], c["y"]) for c in self.chart(title)["curves"]]

    def page(self):
        return Page(render_page(self.report))


class Page(HTMLParser):
    """Elements of a page, and the text in them. Every element that is opened must be closed."""

    def __init__(self, page):
        super().__init__()
        self.text, self.open, self.found, self.words, self.scripts = page, [], [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, name, attributes):
        self.found.append((name, dict(attributes)))
        self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.found.append((name, dict(attributes)))

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            if "type" not in self.found[-1][1]:
                self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.words.append(data)

    def all(self, name):
        """Return the attributes of the elements with a name."""
        return [attributes for tag, attributes in self.found if tag == name]


def check_self_contained(page, scripts=()):
    """Check that the page loads nothing, and runs only the scripts whose digests its policy
    names."""
    for name, attributes in page.found:
        assert name not in ("link", "iframe", "object", "base", "form", "foreignobject")
        assert attributes.get("src", "data:image/png;").startswith("data:image/png;")
        assert attributes.get("href", "#").startswith("#")
        assert not [key for key in attributes if key.startswith("on")]
        if name == "script":
            assert attributes in ({}, {"type": "application/json"})
    assert page.scripts == [*scripts]
    digests = [hashlib.sha256(script.encode()).digest() for script in page.scripts]
    allowed = " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)
    [policy] = [a["content"] for a in page.all("meta") if "http-equiv" in a]
    runs = f"; script-src {allowed}" if scripts else ""
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'{runs}"
    assert "url(" not in page.text and "@import" not in page.text
    without_library = page.text.replace(chart_scripts()[0], "")
    assert "http://" not in without_library and "https://" not in without_library
    anchors = {attributes["id"] for _, attributes in page.found if "id" in attributes}
    assert {a["href"][1:] for a in page.all("a")} == anchors


def colour(code):
    return tuple(bytes.fromhex(code))


def browse(path, *options):
    """Return the output of Chromium for a page whose scripts have run."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--force-device-scale-factor=1", "--force-color-profile=srgb", *options]
    command += [f"--user-data-dir={path.parent / 'profile'}", path.as_uri()]
    env = os.environ | {"HOME": str(path.parent)}
    done = subprocess.run(command, check=True, timeout=120, env=env, capture_output=True, text=True)
    return done.stdout


is_missing = shutil.which("chromium") is None
in_a_browser = pytest.mark.skipif(is_missing, reason="chromium is not on PATH")

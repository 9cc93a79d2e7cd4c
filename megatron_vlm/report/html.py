"""A report as a page that needs no other file and no network, drawn by Jinja2 templates. A section
has the template of its name in templates/. Text of a record stays text: every value is escaped that
is not itself the markup of a template, and its control characters are spelled out."""

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megatron_vlm.data.tokens.boxes_as_text import Outline
from megatron_vlm.io.printable import escape_controls, number, show_count, time_spent
from megatron_vlm.report import charts, sections
from megatron_vlm.report.picture_uri import data_uri
from megatron_vlm.report.sections import Marked, Report, Section, Styled

_PACKAGE = Path(__file__).parents[1]
# Should any text of a record become markup after all, it still loads nothing and runs nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_MAX_OUTLINES = 200  # outlines on a picture


def render_page(report: Report) -> str:
    """Return the whole page. It has the scripts and styles that its charts need."""
    css, scripts = "", []
    if any(isinstance(part, charts.Charts) for part in report.sections):
        css, scripts = charts.chart_css(), [*charts.chart_scripts()]
    if any(isinstance(part, sections.Command | sections.Timeline) for part in report.sections):
        scripts.append(script_of("copy"))
    if any(isinstance(part, sections.CardPages) for part in report.sections):
        scripts.append(script_of("paging"))
    return document(report.tab, css, page_body(report), scripts)


def script_of(name: Literal["copy", "paging"]) -> str:
    """Return copy.js, for words to copy and pipelines to point at, or paging.js, for many cards."""
    return Path(__file__).with_name(f"{name}.js").read_text()


def document(
    title: str,
    css: str,
    body: Iterable[Markup],
    scripts: Sequence[str] = (),
    is_served: bool = False,
) -> str:
    """Return a whole page; the styles all pages share come first. Browsers run only `scripts`,
    whose digests the policy names. A page that a server gives `is_served` more by that server."""
    assert not any(re.search(r"</script|<!--|\r", script, re.IGNORECASE) for script in scripts)
    digests = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"{_POLICY}; script-src {allowed}" if scripts else _POLICY
    policy += "; connect-src 'self'" * is_served
    css = Path(__file__).with_name("page.css").read_text() + css
    known = dict(title=title, policy=policy, css=css, body=body, scripts=scripts)
    return fill_template("report/templates/page", **known) + "\n"


def page_body(report: Report) -> Iterator[Markup]:
    """Yield the elements of a page in their order."""
    headings = [part for part in report.sections if isinstance(part, sections.Heading)]
    names = [heading.name for heading in headings if heading.name]
    yield fill_template("report/templates/head", report=report, names=names)
    first = next((part for part in report.sections if isinstance(part, charts.Charts)), None)
    for part in (*report.summary, *report.sections):
        if part is first:
            yield fill_template("report/templates/chart_help")
        yield draw_parts(part)


def draw_parts(*parts: Section | Styled | Marked | str) -> Markup:
    """Return the elements of sections next to each other, or of texts."""
    return Markup().join(
        escape_controls(part)
        if isinstance(part, str)
        else fill_template(f"report/templates/{type(part).__name__}", part=part)
        for part in parts
    )


def fill_template(template: str, **known: Any) -> Markup:
    """Return what a template, by its path in the package, makes of values."""
    return Markup(_TEMPLATES.get_template(f"{template}.html").render(known))


def tile_columns(count: int) -> int:
    """Return the columns of tiles on a wide page that leave the fewest places empty."""
    few = (3,) if count <= 6 else ()
    return min((5, 4, *few), key=lambda columns: -count % columns)


def count_outlines(outlines: Sequence[Outline]) -> str:
    """Return the numbers of boxes and points in words."""
    points = sum(len(each.numbers) == 2 for each in outlines)
    counts = {"box": len(outlines) - points, "point": points}
    words = [show_count(count, kind) for kind, count in counts.items() if count]
    if len(outlines) > _MAX_OUTLINES:
        words.append(f"the first {_MAX_OUTLINES} drawn")
    return ", ".join(words)


def anchor(name: str) -> str:
    """Return the name of a heading, or of a state, as links and styles have it."""
    return name.lower().replace(" ", "-")


def _spell_out(value: object) -> object:
    if isinstance(value, str) and not isinstance(value, Markup):
        return escape_controls(value)
    return value


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_PACKAGE),
        autoescape=True,
        finalize=_spell_out,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    words = (number, show_count, time_spent, anchor, count_outlines, data_uri, tile_columns)
    shapes = (charts.bins, charts.scatter_plot, charts.curve_summaries, charts.chart_data)
    made.filters |= {each.__name__: each for each in (*words, *shapes, charts.control_data)}
    made.tests["picture_uri"] = sections.is_picture_uri
    made.globals |= {"draw": draw_parts, "format": format, "zip": zip}
    made.globals |= {"MAX_OUTLINES": _MAX_OUTLINES, "CURVE_COLOURS": charts.CURVE_COLOURS}
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return made


_TEMPLATES = _environment()

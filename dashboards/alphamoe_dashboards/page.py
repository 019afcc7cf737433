"""Put a page together: one HTML file with its data, its style, its scripts and one plotly.js. It asks no network."""

from __future__ import annotations

import html
from functools import cache
from importlib.resources import files

from alphamoe_dashboards.digest import RunDigest
from alphamoe_dashboards.page_data import encode, page_document

SCRIPTS = (
    "data", "stats", "state", "dom", "query", "charts", "filters", "overview", "buckets", "bucket_charts", "ranks",
    "timeline", "steps", "symbols", "run", "compare", "main",
)  # fmt: skip


def render(runs: list[RunDigest]) -> str:
    """Return the page of one run, or of a baseline and a candidate. Equal runs give equal bytes."""
    title = " and ".join(str(run.facts["name"]) for run in runs)
    parts = {
        "title": html.escape(f"{title}: M buckets"),
        "css": _template("style.css"),
        "data": encode(page_document(runs)),
        "plotly": plotly_js(),
        "scripts": "\n".join(_template(f"{name}.js") for name in SCRIPTS),
    }
    page = _template("page.html")
    # Cut at the placeholders of the template only: data may hold text that looks like one.
    head, *rest = page.split("{{")
    pieces = [head]
    for part in rest:
        name, tail = part.split("}}", 1)
        pieces += [parts[name], tail]
    return "".join(pieces)


@cache
def plotly_js() -> str:
    """Return the plotly.js that comes with plotly, safe inside a script element."""
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


@cache
def _template(name: str) -> str:
    return files("alphamoe_dashboards").joinpath("templates", name).read_text(encoding="utf-8")

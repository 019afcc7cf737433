"""The JSON document inside a page, and what tests need to read it back as the page does."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from alphamoe_dashboards.columns import Columns, pack, unpack
from alphamoe_dashboards.compare import compare
from alphamoe_dashboards.digest import RunDigest
from alphamoe_dashboards.evidence_cells import STATES
from alphamoe_dashboards.histograms import ACCURACY, GROWTH
from alphamoe_dashboards.shells import shells
from alphamoe_dashboards.style import PALETTE
from alphamoe_tracers.errors import EvidenceError

SCHEMA = "alphamoe-trace-dashboard-v1"
_NOT_ON_THE_PAGE = ("clusters",)
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def page_document(runs: list[RunDigest]) -> dict[str, Any]:
    """Return everything that a page shows of one run, or of a baseline and a candidate that share a string table."""
    compared = None
    if len(runs) == 2:
        compared = compare(runs[0], runs[1])
        compared["rows"] = pack(compared["rows"])
    return {
        "schema": SCHEMA,
        "palette": PALETTE,
        "shells": shells(),
        "states": list(STATES),
        "histogram": {"growth": GROWTH, "accuracy": ACCURACY},
        "runs": [
            {
                "facts": run.facts,
                "tables": {name: pack(columns) for name, columns in run.tables.items() if name not in _NOT_ON_THE_PAGE},
            }
            for run in runs
        ],
        "compare": compared,
        "strings": runs[0].strings.values,
    }


def encode(document: dict[str, Any]) -> str:
    """Return the document as JSON that can stand inside a script element: no ``<`` is left in it, keys are sorted."""
    text = msgspec.json.encode(document, order="sorted").decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def read_page(html: str) -> dict[str, Any]:
    """Return the document inside a page with every table unpacked.

    Raises:
        EvidenceError: it holds none.
    """
    found = _DATA.search(html)
    if found is None:
        raise EvidenceError("no dashboard data in this page")
    document: dict[str, Any] = msgspec.json.decode(found.group(1))
    for run in document["runs"]:
        run["tables"] = {name: _table(packed) for name, packed in run["tables"].items()}
    if document["compare"]:
        document["compare"]["rows"] = _table(document["compare"]["rows"])
    return document


def _table(packed: dict[str, Any]) -> Columns:
    return unpack(packed)

"""Names of kernels are data. Plotly reads some tags in labels as markup, so what goes into a label is escaped here."""

from __future__ import annotations

_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;"})
"""``$`` too: plotly hands text between two of them to MathJax where a page has it."""
MAX_LABEL = 48


def escape_label(text: str) -> str:
    """Return text that a plotly label, title, legend or hover shows letter by letter."""
    return text.translate(_ESCAPES)


def short(text: str, limit: int = MAX_LABEL) -> str:
    """Cut the middle out of a long name: template arguments at the end tell kernels apart as often as the start."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    return f"{text[:head]}…{text[-(limit - head - 1) :]}"


def label(text: str, limit: int = MAX_LABEL) -> str:
    """Return a short escaped label."""
    return escape_label(short(text, limit))

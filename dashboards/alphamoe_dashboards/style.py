"""One look for every figure: a colour-blind-safe palette (Okabe and Ito), marker symbols beside colours, plain axes."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from alphamoe_tracers.records import EXECUTIONS

PALETTE = {
    "light": [
        "#0072B2",
        "#D55E00",
        "#009E73",
        "#CC79A7",
        "#B8860B",
        "#56B4E9",
        "#7A4FB5",
        "#4D4D4D",
        "#A0522D",
        "#5F9EA0",
    ],
    "dark": [
        "#56B4E9",
        "#F0803C",
        "#2FC49A",
        "#E39CC4",
        "#F0C83C",
        "#9BD3F5",
        "#B79AE8",
        "#BDBDBD",
        "#D79B7A",
        "#8FC7C9",
    ],
}
"""The same hue at the same place in both themes. More classes than colours reuse them, and are told apart by text."""
SYMBOLS = ["circle", "square", "diamond", "cross", "triangle-up", "x", "triangle-down", "star", "pentagon", "hexagon"]
EXECUTION_ORDER: dict[str, int] = {str(name): number for number, name in enumerate(EXECUTIONS)}
TALL_LEGEND = {"l": 60, "r": 16, "t": 92, "b": 44}
"""Margins of a figure whose legend may take two rows."""
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def colour(number: int, theme: str = "light") -> str:
    """Return the colour of a place in the palette."""
    return PALETTE[theme][number % len(PALETTE[theme])]


def execution_place(execution: str | None) -> int:
    """Return the place of an execution in the palette and in every legend."""
    return EXECUTION_ORDER.get(execution or "", len(EXECUTION_ORDER))


def figure(title: str, x: str, y: str, *, shared_gpu: bool = False, height: int = 340, **layout: Any) -> go.Figure:
    """Return an empty figure.

    Args:
        title: plain text, already escaped. x, y: axis titles with their units.
        shared_gpu: ranks share a GPU, so that no time in it is comparable with anything: the title says so.
        height: pixels. layout: more of plotly's layout.
    """
    told = f"{title} (shared GPU: times are inflated)" if shared_gpu else title
    axis = {"automargin": True, "zeroline": False, "showline": True, "ticks": "outside", "gridwidth": 1}
    axis |= {"exponentformat": "none", "separatethousands": True}
    return go.Figure(
        layout={
            "template": go.layout.Template(),
            "title": {"text": told, "x": 0.012, "xanchor": "left", "font": {"size": 14}, "y": 0.97, "yanchor": "top"},
            "font": {"family": FONT, "size": 12},
            "height": height,
            "showlegend": True,
            "margin": {"l": 60, "r": 16, "t": 62, "b": 44},
            "xaxis": axis | {"title": {"text": x}},
            "yaxis": axis | {"title": {"text": y}, "rangemode": "tozero"},
            "legend": {"orientation": "h", "y": 1.01, "yanchor": "bottom", "x": 0, "xanchor": "left"},
            "hoverlabel": {"align": "left", "namelength": -1},
            "plot_bgcolor": "#ffffff",
            "paper_bgcolor": "#ffffff",
            **layout,
        }
    )


def categorical_m(fig: go.Figure, values: list[int]) -> go.Figure:
    """Put M on a categorical axis in ascending order, 0 included: a log axis would lose it."""
    order = [str(value) for value in sorted(set(values))]
    fig.update_xaxes(type="category", categoryorder="array", categoryarray=order)
    return fig

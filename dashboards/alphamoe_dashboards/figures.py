"""Figures of M buckets: each function takes a table and returns a plotly figure, for notebooks, PRs and the page.

Tables come from :mod:`alphamoe_dashboards.tables`. The page uses the same figures: it takes their layout and the style
of their traces, and fills in the data that its filters leave.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from alphamoe_dashboards.evidence_cells import STATES
from alphamoe_dashboards.labels import escape_label, label
from alphamoe_dashboards.style import SYMBOLS, TALL_LEGEND, categorical_m, colour, execution_place, figure

STATE_MARKS = {"equal": "=", "fewer": "<", "more": ">", "none": "∅", "unknown": "?"}
_STATE_COLOURS = {"equal": "#009E73", "fewer": "#E69F00", "more": "#CC79A7", "none": "#D55E00", "unknown": "#BDBDBD"}


def matrix_figure(cells: pd.DataFrame) -> go.Figure:
    """Draw execution x kernel M against rank, each cell with its receipts and witnesses.

    A cell with ``(!)`` holds launch shapes that contradict its M.

    Args:
        cells: execution, M, symbol, rank, submissions, witnesses, shape_bad, state.
    """
    keys = cells[["execution", "M", "symbol"]].drop_duplicates()
    several = keys["symbol"].nunique() > 1
    keys = keys.assign(_at=[execution_place(name) for name in keys["execution"]]).sort_values(["_at", "M", "symbol"])
    rows = [_row_name(row, several) for row in keys.itertuples()]
    fig = figure("Witnesses of receipts by M bucket", "rank", "", height=110 + 26 * max(len(rows), 1))
    scale: list[list[Any]] = []
    for number, state in enumerate(STATES):
        scale += [[number / len(STATES), _STATE_COLOURS[state]], [(number + 1) / len(STATES), _STATE_COLOURS[state]]]
    if len(cells):
        at = {name: number for number, name in enumerate(STATES)}
        named = cells.assign(row=[_row_name(row, several) for row in cells.itertuples()])
        wide = named.pivot_table(index="row", columns="rank", values="state", aggfunc="first").reindex(rows)
        texts = named.assign(told=[_cell_text(row) for row in named.itertuples()])
        told = texts.pivot_table(index="row", columns="rank", values="told", aggfunc="first").reindex(rows)
        z = wide.map(lambda state: at.get(state) if isinstance(state, str) else None)
        fig.add_trace(
            go.Heatmap(
                x=[str(rank) for rank in wide.columns], y=rows, z=z.to_numpy(), text=told.fillna("").to_numpy(),
                texttemplate="%{text}", zmin=0, zmax=len(STATES), colorscale=scale, showscale=False, xgap=2, ygap=2,
                hovertemplate="rank %{x}, %{y}<br>%{text}<extra></extra>",
            )
        )  # fmt: skip
    fig.update_xaxes(type="category")
    return fig.update_yaxes(type="category", autorange="reversed")


def _row_name(row: Any, several: bool) -> str:
    return f"{row.execution} M {row.M}" + (f"<br>{label(str(row.symbol), 30)}" if several else "")


def _cell_text(row: Any) -> str:
    submitted = "?" if row.submissions < 0 else f"{row.submissions:,}"
    bad = " (!)" if getattr(row, "shape_bad", 0) else ""
    return escape_label(f"{row.witnesses:,} {STATE_MARKS[row.state]} {submitted}{bad}")


def launches_figure(buckets: pd.DataFrame) -> go.Figure:
    """Draw launches by M bucket and execution.

    Args:
        buckets: execution, M, calls.
    """
    return _bars(buckets, "calls", "Launches", "launches")


def gpu_time_figure(buckets: pd.DataFrame, shared_gpu: bool = False) -> go.Figure:
    """Draw summed kernel time by M bucket and execution.

    Args:
        buckets: execution, M, sum_ns.
        shared_gpu: say so beside the time.
    """
    own = buckets.assign(sum_ms=buckets["sum_ns"] / 1e6)
    return _bars(own, "sum_ms", "GPU time", "GPU time (ms)", shared_gpu)


def _bars(table: pd.DataFrame, value: str, title: str, axis: str, shared_gpu: bool = False) -> go.Figure:
    fig = figure(title, "M", axis, shared_gpu=shared_gpu, height=290, barmode="group")
    for execution, own in _by_execution(table):
        place = execution_place(execution)
        pattern = {"shape": ["", "/", "x", "."][place % 4], "size": 6, "solidity": 0.35}
        fig.add_trace(
            go.Bar(
                x=own["M"].astype(str).tolist(), y=own[value].tolist(), name=label(execution),
                marker={"color": colour(place), "pattern": pattern},
                hovertemplate="M %{x}: %{y:,}<extra>" + label(execution) + "</extra>",
            )
        )  # fmt: skip
    return categorical_m(fig, table["M"].tolist())


def duration_figure(boxes: pd.DataFrame, points: pd.DataFrame, shared_gpu: bool = False) -> go.Figure:
    """Draw the kernel duration by M: a box of every kernel, and the exact points of the sampled steps.

    Args:
        boxes: execution, M, low, q1, median, q3, high: quantiles in ns (2 %, 25 %, 50 %, 75 %, 98 %).
        points: execution, M, duration_ns.
        shared_gpu: say so beside the time.
    """
    fig = figure(
        "Kernel duration by M",
        "M",
        "duration (us)",
        shared_gpu=shared_gpu,
        height=380,
        boxmode="group",
        scattermode="group",
    )
    for execution, own in _by_execution(boxes):
        place = execution_place(execution)
        fig.add_trace(
            go.Box(
                x=own["M"].astype(str).tolist(), name=label(execution), boxpoints=False, offsetgroup=str(place),
                lowerfence=_us(own["low"]), q1=_us(own["q1"]), median=_us(own["median"]), q3=_us(own["q3"]),
                upperfence=_us(own["high"]), line={"color": colour(place), "width": 1.5},
            )
        )  # fmt: skip
    for execution, own in _by_execution(points):
        place = execution_place(execution)
        fig.add_trace(
            go.Scatter(
                x=own["M"].astype(str).tolist(), y=_us(own["duration_ns"]), mode="markers", showlegend=False,
                name=label(execution), offsetgroup=str(place),
                marker={"symbol": SYMBOLS[place], "size": 5, "opacity": 0.45, "color": colour(place)},
                hovertemplate="M %{x}: %{y:.3f} us<extra>" + label(execution) + "</extra>",
            )
        )  # fmt: skip
    timed = [*boxes["low"].tolist(), *boxes["high"].tolist(), *points["duration_ns"].tolist()]
    if timed and min(timed) > 0 and max(timed) > 10 * min(timed):  # a log axis has no place for 0
        fig.update_yaxes(type="log", rangemode="normal", dtick=1, title_text="duration (us, log)")
    return categorical_m(fig, [*boxes["M"].tolist(), *points["M"].tolist()])


def tokens_figure(tokens: pd.DataFrame) -> go.Figure:
    """Draw mean real tokens, dispatch M and kernel M a step, side by side for each bucket.

    Args:
        tokens: execution, M, real_tokens, dispatch_M (means a step; null where unknown).
    """
    fig = figure("Real tokens, dispatch M, kernel M", "bucket (kernel M)", "rows a step", height=290, barmode="group")
    named = [("real_tokens", "real tokens", 2, ""), ("dispatch_M", "dispatch M", 5, "/"), ("M", "kernel M", 0, "x")]
    rows = tokens.assign(_at=[execution_place(name) for name in tokens["execution"]]).sort_values(["_at", "M"])
    buckets = [f"{label(str(row.execution))} {row.M}" for row in rows.itertuples()]
    for column, name, place, shape in named:
        fig.add_trace(
            go.Bar(
                x=buckets, y=rows[column].tolist(), name=name,
                marker={"color": colour(place), "pattern": {"shape": shape, "size": 6, "solidity": 0.35}},
            )
        )  # fmt: skip
    return fig.update_xaxes(type="category")


def roofline_figure(rows: pd.DataFrame, card: dict[str, Any] | None, shared_gpu: bool = False) -> go.Figure:
    """Draw achieved FLOP/s against arithmetic intensity, under the card's roofs.

    Args:
        rows: execution, M, intensity (FLOP a byte), flop_per_s.
        card: name, bytes_per_s, fp8_flop_per_s (or null), bf16_flop_per_s; null draws no roof.
        shared_gpu: say so beside the rates.
    """
    x = "FLOP per byte (least bytes by geometry)"
    fig = figure("Roofline", x, "TFLOP/s", shared_gpu=shared_gpu, height=400)
    # Nothing can be drawn right of the ridge and far below the roof.
    fig.update_layout(legend={"orientation": "v", "x": 0.99, "xanchor": "right", "y": 0.02, "yanchor": "bottom"})
    fig.update_layout(legend_bgcolor="rgba(0,0,0,0)")
    if card is not None:
        peak = card["fp8_flop_per_s"] or card["bf16_flop_per_s"]
        ridge = peak / card["bytes_per_s"]
        xs = [0.1, ridge, max(ridge * 10, 1e4)]
        ys = [0.1 * card["bytes_per_s"] / 1e12, peak / 1e12, peak / 1e12]
        name = f"{escape_label(card['name'])}: {card['bytes_per_s'] / 1e12:.2f} TB/s, {peak / 1e12:,.0f} TFLOP/s"
        line = {"color": "#7f7f7f", "dash": "dash"}
        fig.add_trace(go.Scatter(x=xs, y=ys, mode="lines", name=name, line=line, hoverinfo="skip"))
    for execution, own in _by_execution(rows):
        place = execution_place(execution)
        fig.add_trace(
            go.Scatter(
                x=own["intensity"].tolist(), y=(own["flop_per_s"] / 1e12).tolist(), mode="markers+text",
                name=label(execution), text=[f"M {m}" for m in own["M"]],
                textposition=["top left", "bottom right", "top right", "bottom left"][place % 4],
                marker={"symbol": SYMBOLS[place], "size": 10, "color": colour(place)},
            )
        )  # fmt: skip
    return fig.update_xaxes(type="log", dtick=1).update_yaxes(type="log", dtick=1, rangemode="normal")


def skew_figure(layers: pd.DataFrame, shared_gpu: bool = False) -> go.Figure:
    """Draw the mean kernel duration of each rank by layer: lines that part show skew.

    Args:
        layers: rank, layer, mean_ns.
        shared_gpu: say so beside the time.
    """
    title = "Mean duration by layer and rank"
    fig = figure(title, "layer", "mean duration (us)", shared_gpu=shared_gpu, height=340, margin=TALL_LEGEND)
    for rank, own in layers.sort_values(["rank", "layer"]).groupby("rank"):
        place = int(str(rank))
        marker = {"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 7, "color": colour(place)}
        line = {"color": colour(place), "width": 1.5}
        fig.add_trace(
            go.Scatter(
                x=own["layer"].tolist(), y=_us(own["mean_ns"]), mode="lines+markers", name=f"rank {rank}",
                marker=marker, line=line,
            )
        )  # fmt: skip
    return fig


def step_skew_figure(steps: pd.DataFrame, shared_gpu: bool = False) -> go.Figure:
    """Draw for each step how far the slowest rank's kernel time lies above the mean of the ranks.

    Args:
        steps: execution, step, skew (slowest over mean, minus 1).
        shared_gpu: say so beside the ratio.
    """
    fig = figure("Skew by step", "step", "slowest rank above mean (%)", shared_gpu=shared_gpu, height=340)
    for execution, own in _by_execution(steps):
        place = execution_place(execution)
        fig.add_trace(
            go.Scatter(
                x=own["step"].tolist(), y=(own["skew"] * 100).tolist(), mode="markers", name=label(execution),
                marker={"symbol": SYMBOLS[place], "size": 6, "color": colour(place)},
            )
        )  # fmt: skip
    return fig


def _us(values: pd.Series) -> list[float]:
    return (values / 1e3).tolist()


def _by_execution(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return the rows of each execution in the vocabulary's order, unknown last."""
    named = table.assign(_name=table["execution"].fillna("no execution known"))
    groups = sorted(named.groupby("_name"), key=lambda item: (execution_place(str(item[0])), str(item[0])))
    return [(str(name), own.sort_values("M" if "M" in own else "step")) for name, own in groups]

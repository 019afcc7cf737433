"""Figures of a whole run: the timeline of one step, memory, wall time, and two runs compared."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from alphamoe_dashboards.labels import label
from alphamoe_dashboards.style import SYMBOLS, TALL_LEGEND, colour, execution_place, figure

MAX_MARKS = 3_000


def timeline_figure(kernels: pd.DataFrame, shared_gpu: bool = False) -> go.Figure:
    """Draw one step: a lane a rank, a line a kernel, colours by class (Scattergl lines: bars crawl past 3,000).

    Args:
        kernels: rank, start_ns (from the step's first event on that rank), duration_ns, class, base. At most
            MAX_MARKS are drawn, the longest ones.
        shared_gpu: say so beside the time.
    """
    fig = figure("Timeline", "time in the step (us)", "rank", shared_gpu=shared_gpu, height=340)
    kept = kernels.nlargest(MAX_MARKS, "duration_ns").sort_values(["rank", "start_ns"])
    order = sorted(kept["class"].fillna("other").unique().tolist())
    for place, kind in enumerate(order):
        own = kept[kept["class"].fillna("other") == kind]
        xs: list[float | None] = []
        ys: list[str | None] = []
        names: list[str | None] = []
        for row in own.itertuples():
            begin = float(row.start_ns) / 1e3
            xs += [begin, begin + float(row.duration_ns) / 1e3, None]
            ys += [str(row.rank), str(row.rank), None]
            names += [label(str(row.base)), label(str(row.base)), None]
        fig.add_trace(
            go.Scattergl(
                x=xs, y=ys, text=names, mode="lines", name=label(str(kind)), line={"width": 14, "color": colour(place)},
                hovertemplate="%{text}<br>%{x:.3f} us<extra>" + label(str(kind)) + "</extra>",
            )
        )  # fmt: skip
    ranks = [str(rank) for rank in sorted(kernels["rank"].unique().tolist())]
    return fig.update_yaxes(type="category", categoryorder="array", categoryarray=ranks, autorange="reversed")


def memory_figure(memory: pd.DataFrame) -> go.Figure:
    """Draw device memory of each rank's process by moment.

    Args:
        memory: rank, moment, gib.
    """
    fig = figure("Memory (snapshots, not peaks)", "rank", "GiB", height=300, barmode="group")
    for place, (moment, own) in enumerate(memory.groupby("moment", sort=False)):
        pattern = {"shape": ["", "/", "x", "."][place % 4], "size": 6, "solidity": 0.35}
        fig.add_trace(
            go.Bar(
                x=own["rank"].astype(str).tolist(), y=own["gib"].tolist(), name=label(str(moment)),
                marker={"color": colour(place), "pattern": pattern},
            )
        )  # fmt: skip
    return fig.update_xaxes(type="category")


def wall_figure(wall: pd.DataFrame) -> go.Figure:
    """Draw wall seconds of each rank by phase.

    Args:
        wall: rank, phase, seconds.
    """
    fig = figure("Wall time by phase", "seconds", "rank", height=330, barmode="stack", margin=TALL_LEGEND)
    for place, (phase, own) in enumerate(wall.groupby("phase", sort=False)):
        pattern = {"shape": ["", "/", "x", ".", "-", "+", "|"][place % 7], "size": 6, "solidity": 0.3}
        fig.add_trace(
            go.Bar(
                y=own["rank"].astype(str).tolist(), x=own["seconds"].tolist(), name=label(str(phase)), orientation="h",
                marker={"color": colour(place), "pattern": pattern},
            )
        )  # fmt: skip
    fig.update_layout(legend_traceorder="normal")  # plotly turns it round for lying bars
    return fig.update_yaxes(type="category", autorange="reversed")


def compare_figure(rows: pd.DataFrame, shared_gpu: bool = False) -> go.Figure:
    """Draw the ratio of mean durations, candidate over baseline, by M with its 95 % interval.

    Args:
        rows: execution, M, ratio, low, high (null where one step gives no interval).
        shared_gpu: say so beside the ratio.
    """
    title = "Mean duration, candidate over baseline"
    fig = figure(title, "M", "ratio", shared_gpu=shared_gpu, height=340)
    fig.add_hline(y=1, line={"dash": "dash", "color": "#7f7f7f", "width": 1})
    for execution, own in rows.assign(_n=rows["execution"].fillna("no execution known")).groupby("_n"):
        place = execution_place(str(execution))
        up, down = (own["high"] - own["ratio"]).fillna(0), (own["ratio"] - own["low"]).fillna(0)
        fig.add_trace(
            go.Scatter(
                x=own["M"].astype(str).tolist(), y=own["ratio"].tolist(), mode="markers", name=label(str(execution)),
                error_y={"type": "data", "symmetric": False, "array": up.tolist(), "arrayminus": down.tolist()},
                marker={"symbol": SYMBOLS[place], "size": 9, "color": colour(place)},
            )
        )  # fmt: skip
    order = [str(value) for value in sorted(set(rows["M"].tolist()))]
    fig.update_yaxes(rangemode="normal")
    return fig.update_xaxes(type="category", categoryorder="array", categoryarray=order)

"""Shells of the page's charts: the Python figures' layouts and trace styles, without their data."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from alphamoe_dashboards import figures, run_figures

_DATA = ("x", "y", "z", "text", "q1", "q3", "median", "lowerfence", "upperfence", "name", "error_y")


def shells() -> dict[str, Any]:
    """Return {chart: {"layout": ..., "traces": [style, ...]}} of every chart whose data the page fills in."""
    one = pd.DataFrame({"execution": ["eager"], "M": [1]})
    box = one.assign(low=1.0, q1=1.0, median=1.0, q3=1.0, high=1.0)
    card = {"name": "", "bytes_per_s": 1e12, "fp8_flop_per_s": 1e15, "bf16_flop_per_s": 1e15}
    kernel = pd.DataFrame({"rank": [0], "start_ns": [0], "duration_ns": [1], "class": ["other"], "base": [""]})
    drawn: dict[str, go.Figure] = {
        "launches": figures.launches_figure(one.assign(calls=1)),
        "gpu_time": figures.gpu_time_figure(one.assign(sum_ns=1)),
        "duration": figures.duration_figure(box, one.assign(duration_ns=1)),
        "tokens": figures.tokens_figure(one.assign(real_tokens=1, dispatch_M=1)),
        "roofline": figures.roofline_figure(one.assign(intensity=1.0, flop_per_s=1e12), card),
        "skew": figures.skew_figure(pd.DataFrame({"rank": [0], "layer": [0], "mean_ns": [1]})),
        "step_skew": figures.step_skew_figure(pd.DataFrame({"execution": ["eager"], "step": [0], "skew": [0.0]})),
        "timeline": run_figures.timeline_figure(kernel),
        "memory": run_figures.memory_figure(pd.DataFrame({"rank": [0], "moment": [""], "gib": [0.0]})),
        "wall": run_figures.wall_figure(pd.DataFrame({"rank": [0], "phase": [""], "seconds": [0.0]})),
        "compare": run_figures.compare_figure(one.assign(ratio=1.0, low=1.0, high=1.0)),
    }
    return {name: _shell(fig) for name, fig in drawn.items()}


def _shell(fig: go.Figure) -> dict[str, Any]:
    plain = fig.to_plotly_json()
    layout = {key: value for key, value in plain["layout"].items() if key != "template"}
    traces = [{key: value for key, value in trace.items() if key not in _DATA} for trace in plain["data"]]
    for axis in ("xaxis", "yaxis"):
        layout[axis].pop("categoryarray", None)
    return {"layout": layout, "traces": traces}

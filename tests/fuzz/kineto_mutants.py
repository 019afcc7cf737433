"""Mutants of Kineto traces of two ranks: damaged without a plan, or robbed of evidence with one."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from damage import cut_bytes, damaged_bytes, damaged_json, json_bytes
from judge import CountingSink, Mutant

from alphamoe_tracers.kineto import read_kineto

RANKS, STEPS = 2, 8
SYMBOL, FORBIDDEN = "moe_gemm", "fused_moe_kernel"
POLICY = f"""
[[require]]
symbol = "{SYMBOL}"
at_least = {2 * STEPS}
[[forbid]]
symbol = "{FORBIDDEN}"
match = "triton"
"""
Event = dict[str, Any]
Trace = dict[str, Any]


def sound(rank: int) -> Trace:
    """A trace in which the required symbol ran and the forbidden one provably did not."""
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": 900, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 900, "tid": 900, "ts": 90 + rank, "dur": 5, "args": {}},
    ]
    correlation = 0
    for step in range(STEPS):
        start = 1_700_000_000_000_000.125 + 1000 * step + 3 * rank
        name = f"execute_context_1({8 + step})_generation_0(0)"
        events.append(_event("user_annotation", name, 900, 900, start, 400, {}))
        for place, symbol in enumerate(("norm_kernel", SYMBOL, SYMBOL)):
            correlation += 1
            at = start + 10 + 30 * place
            events.append(_event("cuda_runtime", "cudaLaunchKernel", 900, 900, at, 2, {"correlation": correlation}))
            args = {"device": 0, "stream": 7, "correlation": correlation, "grid": [8, 1, 1], "block": [128, 1, 1]}
            events.append(_event("kernel", symbol, 0, 7, at + 5, 3.5, args))
    info = {"backend": "nccl", "rank": rank, "world_size": RANKS}
    return {"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}


def _event(kind: str, name: str, pid: int, tid: int, ts: float, dur: float, args: Event) -> Event:
    return {"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def make(rng: random.Random, folder: Path) -> Mutant:
    """Write one mutant into an empty folder."""
    traces = [sound(rank) for rank in range(RANKS)]
    if rng.random() < 0.17:
        kind = rng.choice(list(REMOVALS))
        return whole(folder, f"kineto: {kind}", REMOVALS[kind](rng, [_noisy(rng, trace) for trace in traces]), rng)
    rank = rng.randrange(RANKS)
    kind = rng.choice(("bytes", "bytes", "values", "values", "gzip bytes"))
    content = json_bytes(damaged_json(rng, traces[rank]) if kind == "values" else traces[rank])
    if kind == "bytes":
        content = damaged_bytes(rng, content)
    elif kind == "gzip bytes":
        content = damaged_bytes(rng, gzip.compress(content, 1))
    if rng.random() < 0.1:
        files = {f"p-TP-{own}.trace.json": json_bytes(traces[own]) for own in range(RANKS)}
        files[f"p-TP-{rank}.trace.json"] = content
        return whole(folder, f"kineto: {kind}, gated", files, rng, removed=False)
    path = folder / "p-TP-0.trace.json"
    path.write_bytes(content)
    return Mutant(f"kineto: {kind}, read", read=partial(read_kineto, path, CountingSink()))


Files = dict[str, bytes]


def whole(folder: Path, kind: str, files: Files, rng: random.Random, removed: bool = True) -> Mutant:
    """Write the files and ask the gate."""
    for name, content in files.items():
        path = folder / "traces" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content, 1) if rng.random() < 0.3 and content[:2] != b"\x1f\x8b" else content)
    (folder / "policy.toml").write_text(POLICY)
    words = ("gate", str(folder / "traces"), "--ranks", str(RANKS), "--policy", str(folder / "policy.toml"))
    return Mutant(kind, words, removed=removed)


def untouched(folder: Path) -> Mutant:
    """The sound seed, which must be a PASS."""
    return whole(folder, "kineto: sound", _named([sound(rank) for rank in range(RANKS)]), random.Random(0), False)


def _named(traces: list[Trace]) -> Files:
    return {f"p-TP-{rank}.trace.json": json_bytes(trace) for rank, trace in enumerate(traces)}


def _noisy(rng: random.Random, trace: Trace) -> Trace:
    """Add what is no evidence of anything, and change the order."""
    events = trace["traceEvents"]
    for _ in range(rng.randrange(4)):
        events.append(
            _event("cpu_op", SYMBOL, 900, 900, 1.7e15 + rng.randrange(9000), 1, {"correlation": rng.randrange(9)})
        )
    if rng.random() < 0.5:
        rng.shuffle(events)
    return trace


def _required(trace: Trace) -> list[Event]:
    return [event for event in trace["traceEvents"] if event.get("cat") == "kernel" and event["name"] == SYMBOL]


def _some(rng: random.Random, events: list[Event]) -> list[Event]:
    return rng.sample(events, rng.choice((1, 2, len(events))))


def _dropped(trace: Trace, gone: list[Event]) -> None:
    ids = {id(event) for event in gone}
    trace["traceEvents"] = [event for event in trace["traceEvents"] if id(event) not in ids]


def _kernels(rng: random.Random, traces: list[Trace]) -> Files:
    trace = rng.choice(traces)
    _dropped(trace, _some(rng, _required(trace)))
    return _named(traces)


def _kernels_and_launches(rng: random.Random, traces: list[Trace]) -> Files:
    trace = rng.choice(traces)
    gone = {event["args"]["correlation"] for event in _some(rng, _required(trace))}
    own = ("kernel", "cuda_runtime")
    _dropped(trace, [e for e in trace["traceEvents"] if e.get("cat") in own and e["args"]["correlation"] in gone])
    return _named(traces)


def _changed(field: str, values: tuple[Any, ...]) -> Callable[[random.Random, list[Trace]], Files]:
    def change(rng: random.Random, traces: list[Trace]) -> Files:
        value = rng.choice(values)
        for event in _some(rng, _required(rng.choice(traces))):
            if value is None:
                event.pop(field)
            else:
                event[field] = value
        return _named(traces)

    return change


def _launches(rng: random.Random, traces: list[Trace]) -> Files:
    trace = rng.choice(traces)
    _dropped(trace, [event for event in trace["traceEvents"] if event.get("cat") == "cuda_runtime"])
    return _named(traces)


def _correlation(rng: random.Random, traces: list[Trace]) -> Files:
    for event in _some(rng, _required(rng.choice(traces))):
        event["args"]["correlation"] = rng.choice((0, 999_999, None, "x", -1))
    return _named(traces)


def _rank_file(rng: random.Random, traces: list[Trace]) -> Files:
    files = _named(traces)
    files.pop(rng.choice(list(files)))
    return files


def _cut_file(rng: random.Random, traces: list[Trace]) -> Files:
    files = _named(traces)
    name = rng.choice(list(files))
    content = files[name] if rng.random() < 0.5 else gzip.compress(files[name], 1)
    files[name] = cut_bytes(rng, content)
    return files


def _fallback(rng: random.Random, traces: list[Trace]) -> Files:
    event = rng.choice(
        [e for e in rng.choice(traces)["traceEvents"] if e.get("cat") == "kernel" and e["name"] != SYMBOL]
    )
    event["name"] = rng.choice((FORBIDDEN, f"{FORBIDDEN}_0d1d2de3"))
    return _named(traces)


def _clone(rng: random.Random, traces: list[Trace]) -> Files:
    source = rng.randrange(RANKS)
    files = _named(traces)
    files[f"p-TP-{1 - source}.trace.json"] = files[f"p-TP-{source}.trace.json"]
    return files


def _relabelled_clone(rng: random.Random, traces: list[Trace]) -> Files:
    copy = traces[0] | {"distributedInfo": traces[1]["distributedInfo"]}
    return _named([traces[0], copy])


def _swapped(rng: random.Random, traces: list[Trace]) -> Files:
    return _named(traces[::-1])


def _captures(rng: random.Random, traces: list[Trace]) -> Files:
    return {f"capture_traces/bs_8_rank{rank}.json": json_bytes(trace) for rank, trace in enumerate(traces)}


def _cut_name(rng: random.Random, traces: list[Trace]) -> Files:
    for event in rng.choice(traces)["traceEvents"]:
        if event.get("name") == "norm_kernel":
            event["name"] = rng.choice(("fused_mo…", "f...", "fused_moe_kern..."))
    return _named(traces)


REMOVALS: dict[str, Callable[[random.Random, list[Trace]], Files]] = {
    "required kernels gone": _kernels,
    "required kernels and their launches gone": _kernels_and_launches,
    "required kernels renamed": _changed("name", ("moe_gemm_v2", "combine<moe_gemm>", "MOE_GEMM", "moe", "", None)),
    "required kernels of another category": _changed("cat", ("cpu_op", "cuda_runtime", "gpu_memcpy", "x", None)),
    "required kernels of another phase": _changed("ph", ("i", "M", "B", "b", None)),
    "launches gone": _launches,
    "correlation ids gone": _correlation,
    "a rank's file gone": _rank_file,
    "a file cut": _cut_file,
    "a forbidden kernel": _fallback,
    "a rank cloned": _clone,
    "a rank cloned under its name": _relabelled_clone,
    "ranks swapped": _swapped,
    "captures only": _captures,
    "a name cut": _cut_name,
}

"""The report of a run for a terminal. It renders what :mod:`alphamoe_profiler.inspection` computed and decides nothing.

Names of kernels and paths are shown as text, never read as markup. Without a terminal the output is plain, without
trailing spaces; NO_COLOR and COLUMNS are respected (by rich). Only what a reader copies (the run directory, the next
command) may be longer than a line: it is left to the terminal to wrap.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alphamoe_profiler.evidence import ranks_told
from alphamoe_profiler.inspection import PROGRAM, RankReport, RunReport
from alphamoe_profiler.m_buckets import DiscreteSet, MBuckets
from alphamoe_profiler.printable import print_drawn, printable_line
from alphamoe_profiler.reports.captures import Captured, print_captures
from alphamoe_profiler.reports.fitting import print_fitting, titled_table
from alphamoe_profiler.reports.imported import imported_head, print_imported
from alphamoe_profiler.reports.next_steps import print_next
from alphamoe_profiler.reports.skew import print_skew
from alphamoe_profiler.verdicts import Verdict, worst
from alphamoe_profiler.witness_records import Cell

_STYLE = {
    Verdict.PASS: "bold green",
    Verdict.FAIL: "bold red",
    Verdict.INCONCLUSIVE: "bold yellow",
    Verdict.CONFIG_ERROR: "bold magenta",
}
_SHARED = "shared GPU"
_PROMPT_LETTERS = 60
_LAUNCHER_PHASES = ("start_up", "ranks", "total")
_PHASES = ("start_up", "load", "warm_up", "capture", "prefill", "decode", "collection")


def print_report(
    report: RunReport, file: TextIO | None = None, width: int | None = None, captures: Sequence[Captured] = ()
) -> None:
    """Print the report.

    Args:
        report: what ``inspect_run`` returned.
        file: where to; standard output by default.
        width: columns; the terminal's by default.
        captures: of the run.
    """
    print_drawn(lambda console: _print(console, report, captures), file, width)


def _print(console: Console, report: RunReport, captures: Sequence[Captured]) -> None:
    _head(console, report)
    _ranks(console, report)
    if report.run.kind == "imported":
        print_imported(console, report)
    else:
        _witnesses(console, report)
    _m_buckets(console, report.m_buckets, "step annotation or log line" if report.run.imported else "receipt")
    _coverage(console, report.ranks, report.run.kind == "imported")
    if report.skew is not None:
        print_skew(console, report.skew)
    _memory(console, report)
    _wall_times(console, report)
    print_captures(console, captures, report.run.device_kind)
    _lines(console, "Problems", report.problems, 12)
    _lines(console, "Notes", report.witness.notes, 12)
    _verdict(console, report, captures)


def _head(console: Console, report: RunReport) -> None:
    run = report.run
    console.print(Text.assemble((f"{'run':<9}", "dim"), str(report.path)), soft_wrap=True)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    if run.imported is not None:
        grid.add_row("imported", Text(imported_head(run.imported, run.world_size)))
    else:
        layers = _counted(run.geometry.layers, "layer") if run.geometry is not None else "layers unknown"
        grid.add_row("model", f"{run.model}, {layers}, {_counted(run.world_size, 'rank')}, on {run.device_kind}")
        grid.add_row("backend", run.moe_runner_backend)
    for prompt in run.prompts:
        tokens = _counted(prompt.token_count, "token")
        text = f"{_one_line(prompt.spec)}, {tokens}, sha256 {prompt.sha256[:12]}"
        if prompt.dataset and prompt.dataset_sha256:
            text += f", row {prompt.row} of {prompt.dataset} (sha256 {prompt.dataset_sha256[:12]})"
        grid.add_row("prompt", Text(text))
    if run.inject_fault:
        grid.add_row("fault", Text(f"{run.inject_fault} (planted on purpose)"))
    console.print(grid)
    console.print()


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _one_line(spec: str) -> str:
    """Shorten the words of a prompt: they may be pages long, and run.json holds them all."""
    line = " ".join(spec.split())
    return line if len(line) <= _PROMPT_LETTERS else f"{line[: _PROMPT_LETTERS - 1]}…"


def _ranks(console: Console, report: RunReport) -> None:
    columns = ("rank", "GPU", "kernels", "dropped", "receipts", "ended", "collector")
    table = titled_table(console, "Ranks", *columns)
    for rank in report.ranks:
        gpu = rank.gpu_name or (rank.device or "unknown")
        table.add_row(
            str(rank.rank),
            Text(f"{gpu}{' (shared)' if rank.shared_gpu else ''}"),
            f"{rank.kernels:,}",
            "unknown" if rank.dropped is None else f"{rank.dropped:,}",
            f"{rank.receipts:,}",
            rank.ended,
            Text(rank.collector),
        )
    print_fitting(console, table)
    console.print()


def _witnesses(console: Console, report: RunReport) -> None:
    executions = report.run.executions
    title = "MoE kernels of witness steps, by rank and execution"
    table = titled_table(console, title, "rank", "symbol", *executions, "verdict")
    judged = {(cell.rank, cell.symbol, cell.execution): cell for cell in report.witness.cells}
    rules = list(dict.fromkeys((cell.symbol, cell.required) for cell in report.witness.cells))
    for rank in report.ranks:
        first = True
        for symbol, required in rules:
            own = [cell for (of, name, _), cell in judged.items() if of == rank.rank and name == symbol]
            counts = [_count(judged.get((rank.rank, symbol, execution))) for execution in executions]
            verdict = worst(cell.finding.verdict for cell in own)
            name = symbol if required else f"{symbol} (forbidden)"
            label = Text(verdict.value, style=_STYLE[verdict])
            table.add_row(str(rank.rank) if first else "", Text(printable_line(name)), *counts, label)
            first = False
        for symbol, counts_by_execution in _others(report, rank.rank, {symbol for symbol, _ in rules}).items():
            counts = [Text(f"{counts_by_execution[execution]:,}", style="dim") for execution in executions]
            table.add_row("", Text(printable_line(symbol), style="dim"), *counts, "")
    print_fitting(console, table, keys=2)
    for identity in report.witness.identities:
        console.print(Text(printable_line(f"code behind {identity.told()}"), style="dim"))
    for line in _open_cells(report.witness.cells):
        console.print(line)
    for check in report.witness.checks:
        if check.verdict is not Verdict.PASS:
            console.print(_marked(check.verdict, f"{check.name}: {check.reason}"))
    console.print()


def _count(cell: Cell | None) -> Text:
    if cell is None:
        return Text("-")
    return Text(f"{cell.kernels:,}", style=_STYLE[cell.finding.verdict])


def _others(report: RunReport, rank: int, known: set[str]) -> dict[str, Counter[str]]:
    """Return counts by execution of the other MoE kernels that did run on a rank."""
    own = report.moe[(report.moe["rank"] == rank) & ~report.moe["symbol"].isin(known)]
    found: dict[str, Counter[str]] = {}
    for symbol, execution, kernels in zip(own["symbol"], own["execution"], own["kernels"], strict=True):
        found.setdefault(str(symbol), Counter())[str(execution)] += int(kernels)
    return found


def _open_cells(cells: Sequence[Cell]) -> list[Text]:
    """Return one line for each reason, with the ranks and executions that it holds for."""
    groups: dict[tuple[Verdict, str], list[Cell]] = {}
    for cell in cells:
        if cell.finding.verdict is not Verdict.PASS:
            groups.setdefault((cell.finding.verdict, cell.finding.reason), []).append(cell)
    lines = []
    for (verdict, reason), own in groups.items():
        executions = list(dict.fromkeys(cell.execution for cell in own if cell.execution))
        where = ", ".join(executions)
        ranks = ranks_told(cell.rank for cell in own)
        lines.append(_marked(verdict, f"{ranks}{f', {where}' if where else ''}: {reason}"))
    return lines


def _marked(verdict: Verdict, text: str) -> Text:
    return Text.assemble((verdict.value, _STYLE[verdict]), " ", printable_line(text))


def _m_buckets(console: Console, rows: Sequence[MBuckets], source: str) -> None:
    if not rows:
        console.print(f"M buckets: no {source} of a witness step")
        console.print()
        return
    title = f"M buckets, by {source}: (n; min, max) and the exact set"
    columns = ("execution", "real tokens", "dispatch M", "kernel M")
    table = titled_table(console, title, *columns)
    for row in rows:
        if row.rank is None:
            table.add_row(row.execution, _set(row.real_tokens), _set(row.dispatch_M), _kernel_set(row))
        elif _differs(row, rows):
            table.add_row(f"  rank {row.rank}", _set(row.real_tokens), _set(row.dispatch_M), _kernel_set(row))
    print_fitting(console, table)
    console.print()


def _differs(row: MBuckets, rows: Iterable[MBuckets]) -> bool:
    """Say whether a rank's sets are not those of all ranks together: only then its own row says something."""
    union = next(other for other in rows if other.rank is None and other.execution == row.execution)
    names = ("real_tokens", "dispatch_M", "kernel_M", "witnessed_M")
    return any(getattr(row, name) != getattr(union, name) for name in names)


def _set(values: DiscreteSet) -> Text:
    return Text(f"{values.summary}\n{values.folded}" if values.values else "unknown")


def _kernel_set(row: MBuckets) -> Text:
    text = _set(row.kernel_M)
    if row.witnessed_M == row.kernel_M:
        return text
    missing = f"witnessed {row.witnessed_M.folded}" if row.witnessed_M.values else "none witnessed"
    return text.append(f"\n{missing}", style="yellow")


def _coverage(console: Console, ranks: Sequence[RankReport], imported: bool) -> None:
    total = sum(rank.kernels for rank in ranks)
    if not total:
        console.print("Attribution: no kernel was recorded")
        console.print()
        return
    attributed = sum(rank.attributed for rank in ranks)
    moe, moe_attributed = sum(rank.moe_kernels for rank in ranks), sum(rank.moe_attributed for rank in ranks)
    console.print(Text("Attribution", style="bold"))
    if imported:
        console.print(f"{attributed:,} of {total:,} kernels attributed to a launch inside a range or step annotation")
    else:
        console.print(f"{attributed:,} of {total:,} kernels attributed to request, step, layer, execution and M")
        console.print(f"{moe_attributed:,} of {moe:,} MoE kernels of witness steps attributed")
    reasons: Counter[str] = sum((rank.reasons for rank in ranks), Counter())
    for reason, count in reasons.most_common():
        own = [rank.rank for rank in ranks if rank.reasons[reason]]
        console.print(f"{count:,} not attributed: {reason} ({ranks_told(own)})")
    console.print()


def _memory(console: Console, report: RunReport) -> None:
    ranks = report.ranks
    labels = list(dict.fromkeys(snapshot.label for rank in ranks for snapshot in rank.memory))
    if not labels:
        return
    on_host = report.run.device_kind == "cpu"
    title = "host memory of each rank's process" if on_host else "device used (by this process)"
    table = titled_table(console, f"Memory snapshots in GiB, not peaks: {title}", "rank", *labels)
    for rank in ranks:
        known = {snapshot.label: snapshot for snapshot in rank.memory}
        cells = []
        for label in labels:
            snapshot = known.get(label)
            used = snapshot.device_used_bytes if snapshot else None
            own = snapshot.process_bytes if snapshot else None
            if on_host:
                cells.append(_gib(snapshot.host_rss_bytes if snapshot else None))
            else:
                cells.append(f"{_gib(used)} ({_gib(own)})")
        table.add_row(str(rank.rank), *cells)
    print_fitting(console, table)
    console.print()


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.2f}"


def _wall_times(console: Console, report: RunReport) -> None:
    named = {phase for rank in report.ranks for phase in rank.wall_s}
    phases = [phase for phase in _PHASES if phase in named] + sorted(named - set(_PHASES))
    if not phases and not report.launcher_wall_s:
        return
    title = "Wall times in seconds, kept apart"
    if report.shares_gpu:
        sharing = ranks_told(rank.rank for rank in report.ranks if rank.shared_gpu)
        title += f" ({_SHARED}, {sharing}: comparable with nothing)"
    table = titled_table(console, title, "rank", *phases)
    for rank in report.ranks:
        times = [f"{rank.wall_s[phase]:.3f}" if phase in rank.wall_s else "-" for phase in phases]
        table.add_row(str(rank.rank), *times)
    if phases:
        print_fitting(console, table)
    if report.launcher_wall_s:
        own = report.launcher_wall_s
        names = [name for name in _LAUNCHER_PHASES if name in own] + sorted(set(own) - set(_LAUNCHER_PHASES))
        console.print(f"launcher: {', '.join(f'{name} {own[name]:.3f}' for name in names)}")
    console.print()


def _lines(console: Console, title: str, lines: Sequence[str], at_most: int) -> None:
    if not lines:
        return
    console.print(Text(title, style="bold"))
    for line in lines[:at_most]:
        console.print(Text(printable_line(line)))
    if len(lines) > at_most:
        console.print(f"and {len(lines) - at_most} more (--json lists all)")
    console.print()


def _verdict(console: Console, report: RunReport, captures: Sequence[Captured]) -> None:
    console.print(_marked(report.verdict, report.witness.reason))
    commands = [report.next_command]
    if report.run.device_kind == "cuda" and any("error" not in own for own in captures):
        commands.append(f"{PROGRAM} sanitize {shlex.quote(str(report.path))}")
    print_next(console, *commands)

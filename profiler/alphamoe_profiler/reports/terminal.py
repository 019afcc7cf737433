"""The report of a run for a terminal. It renders what :mod:`alphamoe_profiler.inspection` computed and decides nothing.

Names of kernels and paths are shown as text, never read as markup. Without a terminal the output is plain; NO_COLOR
and COLUMNS are respected (by rich).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alphamoe_profiler.evidence import ranks_told
from alphamoe_profiler.inspection import RankReport, RunReport
from alphamoe_profiler.m_buckets import DiscreteSet, MBuckets
from alphamoe_profiler.verdicts import Verdict, worst
from alphamoe_profiler.witness import Cell

_STYLE = {
    Verdict.PASS: "bold green",
    Verdict.FAIL: "bold red",
    Verdict.INCONCLUSIVE: "bold yellow",
    Verdict.CONFIG_ERROR: "bold magenta",
}
_SHARED = "shared GPU"
_PHASES = ("start_up", "load", "warm_up", "capture", "prefill", "decode", "collection")


def print_report(report: RunReport, file: TextIO | None = None, width: int | None = None) -> None:
    """Print the report.

    Args:
        report: what ``inspect_run`` returned.
        file: where to; standard output by default.
        width: columns; the terminal's by default.
    """
    console = Console(file=file, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False)
    _head(console, report)
    _ranks(console, report)
    _witnesses(console, report)
    _m_buckets(console, report.m_buckets)
    _coverage(console, report.ranks)
    _memory(console, report.ranks)
    _wall_times(console, report)
    _lines(console, "Problems", report.problems, 12)
    _lines(console, "Notes", report.witness.notes, 12)
    _verdict(console, report)


def _table(console: Console, title: str, *columns: str) -> Table:
    """Print a title (as a line, because a table's own title is wrapped to the table) and return its empty table."""
    console.print(Text(title, style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold", header_style="dim")
    return table


def _head(console: Console, report: RunReport) -> None:
    run = report.run
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("run", Text(str(report.path)))
    grid.add_row("model", f"{run.model}, {run.geometry.layers} layers, {run.world_size} ranks, on {run.device_kind}")
    grid.add_row("backend", run.moe_runner_backend)
    for prompt in run.prompts:
        text = f"{prompt.spec}, {prompt.token_count} tokens, sha256 {prompt.sha256[:12]}"
        if prompt.dataset and prompt.dataset_sha256:
            text += f", row {prompt.row} of {prompt.dataset} (sha256 {prompt.dataset_sha256[:12]})"
        grid.add_row("prompt", Text(text))
    if run.inject_fault:
        grid.add_row("fault", Text(f"{run.inject_fault} (planted on purpose)"))
    console.print(grid)
    console.print()


def _ranks(console: Console, report: RunReport) -> None:
    table = _table(console, "Ranks", "rank", "GPU", "kernels", "dropped", "receipts", "ended", "collector")
    for rank in report.ranks:
        gpu = rank.gpu_name or (rank.device or "unknown")
        table.add_row(
            str(rank.rank),
            Text(f"{gpu}{f' ({_SHARED})' if rank.shared_gpu else ''}"),
            f"{rank.kernels:,}",
            "unknown" if rank.dropped is None else f"{rank.dropped:,}",
            f"{rank.receipts:,}",
            rank.ended,
            Text(rank.collector),
        )
    console.print(table)
    console.print()


def _witnesses(console: Console, report: RunReport) -> None:
    executions = report.run.executions
    headers = [execution.replace("_", "_\n") for execution in executions]
    table = _table(
        console, "MoE kernels of witness steps, by rank and execution", "rank", "symbol", *headers, "verdict"
    )
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
            table.add_row(str(rank.rank) if first else "", Text(name), *counts, label)
            first = False
        for symbol, counts_by_execution in _others(report, rank.rank, {symbol for symbol, _ in rules}).items():
            counts = [Text(f"{counts_by_execution[execution]:,}", style="dim") for execution in executions]
            table.add_row("", Text(symbol, style="dim"), *counts, "")
    console.print(table)
    for identity in report.witness.identities:
        console.print(Text(f"code behind {identity.told()}", style="dim"))
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
    return Text.assemble((verdict.value, _STYLE[verdict]), " ", text)


def _m_buckets(console: Console, rows: Sequence[MBuckets]) -> None:
    if not rows:
        console.print("M buckets: no receipt of a witness step")
        console.print()
        return
    title = "M buckets, by receipt: (n; min, max) and the exact set"
    table = _table(console, title, "execution", "real tokens", "dispatch M", "kernel M")
    for row in rows:
        if row.rank is None:
            table.add_row(row.execution, _set(row.real_tokens), _set(row.dispatch_M), _kernel_set(row))
        elif _differs(row, rows):
            table.add_row(f"  rank {row.rank}", _set(row.real_tokens), _set(row.dispatch_M), _kernel_set(row))
    console.print(table)
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


def _coverage(console: Console, ranks: Sequence[RankReport]) -> None:
    total = sum(rank.kernels for rank in ranks)
    if not total:
        console.print("Attribution: no kernel was recorded")
        console.print()
        return
    attributed = sum(rank.attributed for rank in ranks)
    moe, moe_attributed = sum(rank.moe_kernels for rank in ranks), sum(rank.moe_attributed for rank in ranks)
    console.print(Text("Attribution", style="bold"))
    console.print(f"{attributed:,} of {total:,} kernels attributed to request, step, layer, execution and M")
    console.print(f"{moe_attributed:,} of {moe:,} MoE kernels of witness steps attributed")
    reasons: Counter[str] = sum((rank.reasons for rank in ranks), Counter())
    for reason, count in reasons.most_common():
        own = [rank.rank for rank in ranks if rank.reasons[reason]]
        console.print(f"{count:,} not attributed: {reason} ({ranks_told(own)})")
    console.print()


def _memory(console: Console, ranks: Sequence[RankReport]) -> None:
    labels = list(dict.fromkeys(snapshot.label for rank in ranks for snapshot in rank.memory))
    if not labels:
        return
    table = _table(console, "Memory snapshots, not peaks: device used (this process)", "rank", *labels)
    for rank in ranks:
        known = {snapshot.label: snapshot for snapshot in rank.memory}
        cells = []
        for label in labels:
            snapshot = known.get(label)
            used = snapshot.device_used_bytes if snapshot else None
            own = (snapshot.process_bytes or snapshot.host_rss_bytes) if snapshot else None
            cells.append(f"{_gib(used)} ({_gib(own)})")
        table.add_row(str(rank.rank), *cells)
    console.print(table)
    console.print()


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.2f} GiB"


def _wall_times(console: Console, report: RunReport) -> None:
    named = {phase for rank in report.ranks for phase in rank.wall_s}
    phases = [phase for phase in _PHASES if phase in named] + sorted(named - set(_PHASES))
    if not phases and not report.launcher_wall_s:
        return
    title = "Wall times in seconds, kept apart"
    if report.shares_gpu:
        title += f" ({_SHARED}: comparable with nothing)"
    table = _table(console, title, "rank", *phases)
    for rank in report.ranks:
        mark = f" {_SHARED}" if rank.shared_gpu else ""
        times = [f"{rank.wall_s[phase]:.3f}{mark}" if phase in rank.wall_s else "-" for phase in phases]
        table.add_row(str(rank.rank), *times)
    console.print(table)
    if report.launcher_wall_s:
        mark = f" ({_SHARED})" if report.shares_gpu else ""
        parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in report.launcher_wall_s.items())
        console.print(f"launcher: {parts}{mark}")
    console.print()


def _lines(console: Console, title: str, lines: Sequence[str], at_most: int) -> None:
    if not lines:
        return
    console.print(Text(title, style="bold"))
    for line in lines[:at_most]:
        console.print(Text(line))
    if len(lines) > at_most:
        console.print(f"and {len(lines) - at_most} more (--json lists all)")
    console.print()


def _verdict(console: Console, report: RunReport) -> None:
    console.print(_marked(report.verdict, report.witness.reason))
    console.print(Text.assemble(("next: ", "dim"), report.next_command))

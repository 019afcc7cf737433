"""Import traces of other tools into a run bundle: plan, read in parallel, give ranks, then appear as a whole.

Everything is written beside the target under a temporary name and renamed at the end, so an import that was
interrupted, or that met contradictory files, leaves nothing. Importing again replaces the bundle as a whole or is
refused.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pyarrow.parquet as pq

from alphamoe_profiler.bundle import MAX_WORLD_SIZE
from alphamoe_profiler.bundle_files import replacing
from alphamoe_profiler.bundle_writer import BundleWriter
from alphamoe_profiler.import_plan import ImportPlan, plan_import
from alphamoe_profiler.import_ranks import RankMap, RankPart, resolve
from alphamoe_profiler.import_records import PART_SHIFT, GraphExecution, ImportedFile, ImportedStep, ImportInfo
from alphamoe_profiler.import_sink import append_part, write_steps
from alphamoe_profiler.import_worker import FileResult, read_files
from alphamoe_profiler.m_buckets import fold
from alphamoe_profiler.redact import redact_argv
from alphamoe_profiler.run_identity import new_run_id, utc_now, versions
from alphamoe_profiler.run_records import RankEnd, RankFile, RunInfo, RunOutcome
from alphamoe_tracers.errors import AlphaMoEError, UsageError
from alphamoe_tracers.records import EXECUTIONS, SCHEMA_VERSION, TABLES, Purpose

_STAGING_SUFFIX = ".import.tmp"
_NO_GPU_KERNEL = (
    "no GPU kernel in the traces, so nothing can be witnessed there; record them with GPU activities on "
    "(torch.profiler: activities CPU and CUDA; nsys: --trace=cuda,nvtx --cuda-graph-trace=node)"
)


@dataclass(frozen=True)
class ImportConfig:
    """What the user asked to import."""

    paths: tuple[Path, ...]
    ranks: int
    out: Path
    mapping: tuple[str, ...] = ()
    bucket: str | None = None
    force: bool = False
    purpose: Purpose = "witness"
    graph_execution: GraphExecution = "decode_graph_replay"
    window_ns: tuple[int, int] | None = None
    jobs: int | None = None
    argv: tuple[str, ...] = ("alphamoe-trace", "import")


@dataclass(frozen=True)
class ImportedRank:
    """What one rank came to."""

    rank: int
    files: tuple[str, ...]
    kernels: int
    launches: int
    graph_launches: int
    steps: int
    dispatch_records: int
    complete: bool
    """Everything that is there for it was read to the end."""
    problem: str | None
    """Why it proves less than a whole trace."""


@dataclass(frozen=True)
class ImportResult:
    """What an import came to."""

    path: Path
    ranks: tuple[ImportedRank, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def complete(self) -> bool:
        """Every rank has evidence that was read to its end."""
        return all(rank.complete for rank in self.ranks)


def run_import(config: ImportConfig, progress: Callable[[ImportPlan], Callable[[int, int, int], None]]) -> ImportResult:
    """Import the files.

    Args:
        config: what to import.
        progress: takes the plan, gives what is called as (file, bytes read, size) while files are read.

    Raises:
        UsageError: the request or the files contradict themselves; nothing was written.
        AlphaMoEError: the bundle cannot be written.
    """
    if not 1 <= config.ranks <= MAX_WORLD_SIZE:
        raise UsageError(f"--ranks {config.ranks}: a run has 1 to {MAX_WORLD_SIZE} ranks", "for example --ranks 4")
    _check_target(config)
    plan = plan_import(config.paths, config.ranks, config.mapping, config.bucket)
    parent = config.out.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{config.out.name}.", suffix=_STAGING_SUFFIX, dir=parent))
    except OSError as error:
        raise AlphaMoEError(f"{parent}: {error.strerror}", "choose another directory with --out") from error
    try:
        jobs = config.jobs or os.cpu_count() or 1
        results = read_files(plan.files, folder / "files", jobs, progress(plan))
        ranks = resolve(plan, results, config.ranks)
        bundle = folder / "run"
        result = _write(config, plan, results, ranks, bundle)
        BundleWriter(config.out, force=config.force)  # makes room, or refuses; leaves an empty directory
        bundle.replace(config.out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _check_target(config: ImportConfig) -> None:
    """Refuse a target that is taken before anything is read."""
    out = config.out
    if not out.exists():
        return
    if not out.is_dir() or out.is_symlink():
        raise UsageError(f"{out} exists and is not a directory", "choose another directory with --out")
    if any(out.iterdir()):
        if not config.force:
            raise UsageError(f"{out} exists", "choose another directory with --out, or replace it with --force")
        if not (out / "run.json").is_file():
            raise UsageError(f"{out} is not a run bundle (it has no run.json): not overwritten", "choose another --out")
    for path in config.paths:
        if path.resolve().is_relative_to(out.resolve()):
            raise UsageError(
                f"{path} lies inside {out}, which would be replaced", "choose another directory with --out"
            )


def _write(
    config: ImportConfig, plan: ImportPlan, results: Sequence[FileResult], ranks: RankMap, out: Path
) -> ImportResult:
    out.mkdir(parents=True)
    writer = BundleWriter(out)
    run = RunInfo(
        schema_version=SCHEMA_VERSION,
        run_id=new_run_id(),
        created=utc_now(),
        argv=redact_argv(config.argv),
        world_size=config.ranks,
        prompts=(),
        model=None,
        geometry=None,
        moe_runner_backend=None,
        executions=EXECUTIONS,
        device_kind="cuda",
        seed=None,
        max_new_tokens=None,
        versions=versions(),
        kind="imported",
        imported=ImportInfo(
            files=_files(plan, results, ranks),
            purpose=config.purpose,
            graph_execution=config.graph_execution,
            window_open_ns=config.window_ns[0] if config.window_ns else None,
            window_close_ns=config.window_ns[1] if config.window_ns else None,
        ),
    )
    writer.write_run(run)
    told = [_write_rank(writer, run, rank, ranks) for rank in range(config.ranks)]
    notes = [f"{path}: {reason}" for path, reason in plan.skipped]
    notes += [f"{item.path}: {reason}" for item, reason in ranks.loose]
    notes += [
        f"{Path(part.summary.path).name}: {note}"
        for own in ranks.parts.values()
        for part in own
        for note in part.summary.notes
    ]
    complete = all(rank.complete for rank in told)
    open_ = [f"rank {rank.rank}: {rank.problem}" for rank in told if rank.problem]
    # There were no processes to end: what a rank lacks is in its own file, or in that file's absence.
    ends = tuple(RankEnd(rank.rank, 0) for rank in told)
    writer.write_outcome(RunOutcome(run.run_id, complete, ends, error=open_[0] if open_ else None))
    silent = [rank.rank for rank in told if rank.problem is None and not rank.kernels]
    if silent:
        notes.insert(0, f"rank {fold(silent)}: {_NO_GPU_KERNEL}")
    return ImportResult(config.out, tuple(told), tuple(dict.fromkeys(notes)))


def _files(plan: ImportPlan, results: Sequence[FileResult], ranks: RankMap) -> tuple[ImportedFile, ...]:
    where: dict[int, list[tuple[int, int, RankPart]]] = {}
    for rank, own in ranks.parts.items():
        for number, part in enumerate(own):
            where.setdefault(part.file.index, []).append((rank, number, part))
    failed = {item.index: rank for rank, own in ranks.unreadable.items() for item, _ in own}
    reasons = {item.index: reason for item, reason in ranks.loose}
    listed = []
    for item, result in zip(plan.files, results, strict=True):
        plain = ImportedFile(
            path=str(item.path),
            size_bytes=item.size_bytes,
            rank=failed.get(item.index),
            part=0,
            bucket=item.bucket,
            stage=item.named.stage,
            used=False,
            reason=result.error or reasons.get(item.index),
        )
        entries = where.get(item.index, [])
        listed += [
            msgspec.structs.replace(plain, rank=rank, part=number, sha256=part.summary.sha256, used=True)
            for rank, number, part in entries
        ]
        if not entries:
            listed.append(plain)
    listed += [
        ImportedFile(str(path), path.stat().st_size, None, 0, used=False, reason=reason)
        for path, reason in plan.skipped
    ]
    return tuple(listed)


def _write_rank(writer: BundleWriter, run: RunInfo, rank: int, ranks: RankMap) -> ImportedRank:
    parts, failed = ranks.parts.get(rank, ()), ranks.unreadable.get(rank, ())
    traces = [part for part in parts if not part.is_log]
    steps, rows = _move_tables(writer, rank, traces)
    records = _move_logs(writer, rank, [part for part in parts if part.is_log])
    summaries = tuple(part.summary for part in parts)
    problem = failed[0][1] if failed else next((s.cut for s in summaries if not s.whole), None)
    if not parts and not failed:
        problem = "no trace was imported for it"
    elif problem is None and not traces:
        problem = "there is a server log but no trace: dispatch evidence is no witness"
    if parts or failed:
        clocks = {part.summary.clock for part in traces}
        record = RankFile(
            run_id=run.run_id,
            rank=rank,
            world_size=run.world_size,
            host=None,
            pid=None,
            device=None,
            gpu_name=None,
            gpu_uuid=None,
            sm_count=None,
            shared_gpu=False,
            collector=None,
            receipts=0,
            sha256={},
            memory=(),
            wall_s={},
            ended="unreadable" if failed else "complete",
            error="; ".join(reason for _, reason in failed) or None,
            clock=clocks.pop() if len(clocks) == 1 else "unknown",
            imported=summaries,
            rows=rows,
        )
        writer.write_rank(record)
    return ImportedRank(
        rank=rank,
        files=tuple(dict.fromkeys(str(part.file.path) for part in parts)) + tuple(str(item.path) for item, _ in failed),
        kernels=sum(summary.kernels for summary in summaries),
        launches=sum(summary.launches for summary in summaries),
        graph_launches=sum(summary.graph_launches for summary in summaries),
        steps=steps,
        dispatch_records=records,
        complete=problem is None,
        problem=problem,
    )


def _move_tables(writer: BundleWriter, rank: int, traces: Sequence[RankPart]) -> tuple[int, dict[str, int]]:
    """Move the staged tables of one rank into the bundle; those of further files get ids of their own.

    Returns:
        The number of steps, and of rows by table.
    """
    rows = dict.fromkeys(TABLES, 0)
    steps: list[ImportedStep] = []
    for number, part in enumerate(traces):
        folder = Path(part.key.folder)
        for name in TABLES:
            staged = folder / name / "part-00000.parquet"
            if not staged.is_file():
                continue
            target = writer.table_dir(name, rank) / f"part-{number:05d}.parquet"
            target.parent.mkdir(parents=True, exist_ok=True)
            rows[name] += pq.read_metadata(staged).num_rows
            if number == 0:
                staged.replace(target)
            else:
                append_part(staged, target, name, number)
        if (folder / "steps.jsonl").is_file():
            decoder = msgspec.json.Decoder(ImportedStep)
            own = decoder.decode_lines((folder / "steps.jsonl").read_bytes())
            moved = number << PART_SHIFT
            steps += [msgspec.structs.replace(item, process=item.process + moved) for item in own]
    if steps:
        numbered = [msgspec.structs.replace(item, step=number) for number, item in enumerate(steps)]
        write_steps(writer.path / "steps" / f"rank={rank}.jsonl", numbered)
    return len(steps), rows


def _move_logs(writer: BundleWriter, rank: int, logs: Sequence[RankPart]) -> int:
    lines = [
        line for part in logs for line in (Path(part.key.folder) / "dispatch_log.jsonl").read_bytes().splitlines(True)
    ]
    if lines:
        with replacing(writer.path / "dispatch_log" / f"rank={rank}.jsonl") as stream:
            stream.writelines(lines)
    return len(lines)

"""One traced run from the question to a closed bundle: check, write run.json, run the ranks, write the outcome."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from alphamoe_backend import environ
from alphamoe_backend.admission import AdmissionRequest, check_admission
from alphamoe_backend.capture_sizes import DEFAULT_DECODE_SIZES, DEFAULT_PREFILL_SIZES, checked_sizes
from alphamoe_backend.experts.registry import required_symbols
from alphamoe_profiler.bundle_writer import BundleWriter
from alphamoe_profiler.memory import survey_gpus
from alphamoe_profiler.prompts import Prompt, load_prompt
from alphamoe_profiler.rank_main import run_rank
from alphamoe_profiler.rank_messages import RankMessage, RankRequest, RankTask, ServedRequest
from alphamoe_profiler.redact import redact_argv, redact_environment, redact_text
from alphamoe_profiler.run_identity import new_run_id, selected_environment, utc_now, versions
from alphamoe_profiler.run_records import GeometryInfo, PromptInfo, RequestRecord, RunInfo, RunOutcome
from alphamoe_profiler.source import source_revision
from alphamoe_profiler.supervisor import Supervision, Supervisor, Target
from alphamoe_profiler.tokenizer import ChatTokenizer
from alphamoe_profiler.trace_config import Resolved, TraceConfig, cpu_threads, default_out, resolve
from alphamoe_tracers.errors import AlphaMoEError, UsageError
from alphamoe_tracers.records import SCHEMA_VERSION
from alphamoe_tracers.scribe_process import wait_for_scribes

RUN_ROOT = Path("alphamoe-runs")
MAX_PROMPT_TOKENS = 16_384
"""Longer prompts would need attention in blocks, which the small engine does not have."""


@dataclass(frozen=True)
class SessionResult:
    """A run that was started."""

    path: Path
    complete: bool
    error: str | None
    """Why it was cut short, one line naming the rank; null when it is complete."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Tokenised:
    prompt: Prompt
    request_id: str
    token_ids: tuple[int, ...]


def run_session(
    config: TraceConfig,
    progress: Callable[[RankMessage], None] | None = None,
    target: Target = run_rank,
    before: Callable[[RunInfo, Path], None] | None = None,
) -> SessionResult:
    """Run one traced session to its end.

    Args:
        config: what was asked.
        progress: called with each message of a rank.
        target: what each rank process runs: captures need another, and tests replace it.
        before: called with what run.json will say and the bundle's directory, before anything is written; what it
            raises ends the session.

    Raises:
        UsageError: the request is wrong; nothing was written.
        AlphaMoEError: the machine cannot take the run (no data set, no directory); nothing is left behind.
    """
    started_s = time.monotonic()
    try:
        Path.cwd()
    except OSError as gone:
        raise AlphaMoEError(f"the current directory is gone ({gone.strerror})", "change to one that exists") from gone
    plan = resolve(config, survey_gpus())
    _check_backend(plan)
    tokenizer = ChatTokenizer()
    requests = _tokenise(config.prompts, tokenizer)
    run = _describe(plan, requests)
    path = config.out if config.out is not None else default_out(RUN_ROOT, run.created, config.prompts[0], run.run_id)
    if before is not None:
        before(run, path)
    with tempfile.TemporaryDirectory(prefix="alphamoe-") as meeting:
        writer = _begin_bundle(path, run, config.force)
        tasks = _tasks(plan, run, path, requests, Path(meeting))
        ranks_s = time.monotonic()
        ended = Supervisor(target, tasks, config.timeout_s, progress or (lambda message: None)).run()
    # A rank that was killed leaves its collector's scribe behind, which still writes what it had got.
    notes = () if wait_for_scribes(path) else ("a collector was still writing when the bundle was closed",)
    error = _write_end(writer, run, ended, requests, tokenizer, started_s, ranks_s)
    return SessionResult(path, error is None, error, (*plan.notes, *ended.notes, *notes))


def _begin_bundle(path: Path, run: RunInfo, force: bool) -> BundleWriter:
    """Create the directory and write run.json into it, or leave neither behind."""
    existed = os.path.lexists(path)
    writer = BundleWriter(path, force=force)
    try:
        writer.write_run(run)
    except BaseException as failure:
        # Nothing was recorded yet: an empty directory must not look like a run. Another run's directory stays.
        if not existed and not isinstance(failure, UsageError):
            shutil.rmtree(path, ignore_errors=True)
        raise
    return writer


def _check_backend(plan: Resolved) -> None:
    """Ask the backend whether it takes this; raises UsageError with its own message."""
    config, moe = plan.config, plan.preset.moe
    required_symbols(config.moe_runner_backend)  # refuses a name that is no backend
    if config.moe_runner_backend == "flashinfer_alphamoe":
        check_admission(
            AdmissionRequest(geometry=moe, world_size=config.ranks, hidden_dtype=plan.dtype, device=plan.device_kind)
        )
    elif moe.quantization != "fp8_w8a8":
        raise UsageError(
            f"{config.moe_runner_backend}: {moe.quantization} experts are not supported",
            "use an FP8 W8A8 model, for example --model qwen3-next-80b",
        )
    if plan.fault is not None and plan.fault.kind == "fallback" and config.moe_runner_backend == "triton":
        raise UsageError("--inject-fault fallback changes nothing in a run of the stock path", "leave one of them out")
    checked_sizes(config.cuda_graph_bs_decode, DEFAULT_DECODE_SIZES, "--cuda-graph-bs-decode")
    checked_sizes(config.cuda_graph_bs_prefill, DEFAULT_PREFILL_SIZES, "--cuda-graph-bs-prefill")


def _tokenise(specs: Sequence[str], tokenizer: ChatTokenizer) -> tuple[_Tokenised, ...]:
    prompts = [load_prompt(spec) for spec in specs]
    requests = tuple(
        _Tokenised(prompt, f"request-{index}", tokenizer.encode_chat(prompt.text))
        for index, prompt in enumerate(prompts)
    )
    for item in requests:
        if len(item.token_ids) > MAX_PROMPT_TOKENS:
            kind, _, rest = item.prompt.spec.partition(":")
            name = f"{kind}:" if kind == "text" else f"{kind}:{rest}"
            raise UsageError(
                f"--prompt {name} has {len(item.token_ids)} tokens", f"at most {MAX_PROMPT_TOKENS} can be served"
            )
    return requests


def _describe(plan: Resolved, requests: Sequence[_Tokenised]) -> RunInfo:
    moe = plan.preset.moe
    return RunInfo(
        schema_version=SCHEMA_VERSION,
        run_id=new_run_id(),
        created=utc_now(),
        argv=redact_argv(plan.config.argv),
        world_size=plan.config.ranks,
        prompts=tuple(
            PromptInfo(
                spec=redact_text(item.prompt.spec),
                request_id=item.request_id,
                sha256=item.prompt.sha256,
                token_count=len(item.token_ids),
                dataset=item.prompt.dataset,
                row=item.prompt.row,
                dataset_sha256=item.prompt.dataset_sha256,
                dataset_source=item.prompt.dataset_source,
            )
            for item in requests
        ),
        model=plan.preset.name,
        geometry=GeometryInfo(
            E=moe.E,
            H=moe.H,
            I=moe.I,
            top_k=moe.top_k,
            block_m=moe.block_m,
            quantization=moe.quantization,
            layers=plan.layers,
        ),
        moe_runner_backend=plan.config.moe_runner_backend,
        executions=plan.executions,
        device_kind="cuda" if plan.gpu_count else "cpu",
        seed=plan.config.seed,
        max_new_tokens=plan.config.max_new_tokens,
        environment=_environment(),
        versions=versions(),
        gpus=tuple(gpu.info for gpu in plan.survey.gpus) if plan.gpu_count else (),
        driver=plan.survey.driver,
        source=source_revision(),
        inject_fault=plan.fault.spec if plan.fault else None,
    )


def _environment() -> dict[str, str]:
    known = {
        name: str(int(entry["value"])) if isinstance(entry["value"], bool) else entry["value"]
        for name, entry in environ.registry().items()
    }
    return dict(sorted({**redact_environment(known), **selected_environment()}.items()))


def _tasks(plan: Resolved, run: RunInfo, path: Path, requests: Sequence[_Tokenised], meeting: Path) -> list[RankTask]:
    config = plan.config
    off = "switched off with --no-collector" if not config.collector else None
    if not plan.gpu_count:
        off = "no CUDA device"
    served = tuple(RankRequest(item.request_id, item.token_ids) for item in requests)
    return [
        RankTask(
            run_id=run.run_id,
            out=str(path.absolute()),
            rank=rank,
            world_size=config.ranks,
            device=plan.device_of(rank),
            gpu_uuid=plan.survey.gpus[rank % plan.gpu_count].info.uuid if plan.gpu_count else None,
            shared_gpu=plan.shares_gpu(rank),
            communication=plan.communication,
            rendezvous=(meeting / "rendezvous").as_uri(),
            model=plan.preset.name,
            layers=plan.layers,
            dtype=plan.dtype,
            moe_runner_backend=config.moe_runner_backend,
            executions=plan.executions,
            cuda_graph_bs_decode=config.cuda_graph_bs_decode,
            cuda_graph_bs_prefill=config.cuda_graph_bs_prefill,
            max_new_tokens=config.max_new_tokens,
            seed=config.seed,
            requests=served,
            nvtx=config.nvtx and environ.NVTX.get(),
            receipts=config.receipts and environ.receipts_armed(),
            collector_off=off,
            inject_fault=plan.fault.spec if plan.fault else None,
            launcher_pid=os.getpid(),
            spawned_ns=time.monotonic_ns(),
            threads=cpu_threads(config.ranks),
            timeout_s=config.timeout_s,
        )
        for rank in range(config.ranks)
    ]


def _write_end(
    writer: BundleWriter,
    run: RunInfo,
    ended: Supervision,
    requests: Sequence[_Tokenised],
    tokenizer: ChatTokenizer,
    started_s: float,
    ranks_s: float,
) -> str | None:
    """Write requests.jsonl and outcome.json; returns why the run was cut short, or null."""
    error = ended.error
    for folder in ("reports/logs", "reports"):
        with contextlib.suppress(OSError):  # only an empty one goes: ranks with nothing to say leave no log
            (writer.path / folder).rmdir()
    try:
        for record in request_records(requests, ended.served, tokenizer, error):
            writer.append_request(record)
        now_s = time.monotonic()
        wall_s = {"start_up": ranks_s - started_s, "ranks": now_s - ranks_s, "total": now_s - started_s}
        outcome = RunOutcome(run_id=run.run_id, complete=error is None, ranks=ended.ends, error=error, wall_s=wall_s)
        writer.write_outcome(outcome)
    except OSError as failure:
        # A full disk: ranks that wrote nothing are cut short already, and a missing outcome.json says the same.
        with contextlib.suppress(OSError):
            (writer.path / "outcome.json").unlink(missing_ok=True)
        return error or f"the outcome could not be written: {failure.strerror}"
    return error


def request_records(
    requests: Sequence[_Tokenised], served: Sequence[ServedRequest], tokenizer: ChatTokenizer, error: str | None
) -> list[RequestRecord]:
    """Return one record for each time a request was served, and one marked cut for each that never was."""
    known = {item.request_id: item for item in requests}
    records = []
    for completion in served:
        # The engine serves a request once eagerly and once with graphs, as request-0@eager and request-0@graphs.
        item = known[completion.request_id.partition("@")[0]]
        text = tokenizer.decode(completion.token_ids)
        records.append(
            RequestRecord(
                request_id=completion.request_id,
                purpose="witness",
                prompt=item.prompt.text,
                prompt_sha256=item.prompt.sha256,
                status="finished",
                prompt_tokens=len(item.token_ids),
                executions=completion.executions,
                response=text,
                response_sha256=hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest(),
                completion_tokens=len(completion.token_ids),
                completion_token_ids=completion.token_ids,
                finish_reason=completion.finish_reason,
                timings_s=completion.timings_s,
            )
        )
    finished = {completion.request_id.partition("@")[0] for completion in served}
    records += [
        RequestRecord(
            request_id=item.request_id,
            purpose="witness",
            prompt=item.prompt.text,
            prompt_sha256=item.prompt.sha256,
            status="cut",
            prompt_tokens=len(item.token_ids),
            error=error,
        )
        for item in requests
        if item.request_id not in finished
    ]
    return records

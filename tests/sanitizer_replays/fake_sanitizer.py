"""A program that behaves as compute-sanitizer was seen to, and worse; and the records that a good run has beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from alphamoe_sanitizer_replays.captures.records import Capture
from alphamoe_sanitizer_replays.results import (
    ControlOutcome,
    ControlReport,
    OutputCheck,
    ReplayResult,
    Tool,
    ToolRun,
)
from alphamoe_sanitizer_replays.tool.file_state import file_state
from alphamoe_sanitizer_replays.tool.sanitizer import ToolPath, run_tool

TARGET = "moe_gemm"
BANNER = "========= COMPUTE-SANITIZER\n"
CLEAN: dict[Tool, str] = {
    "memcheck": f"{BANNER}========= ERROR SUMMARY: 0 errors\n",
    "racecheck": f"{BANNER}========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
    "synccheck": f"{BANNER}========= ERROR SUMMARY: 0 errors\n",
    "initcheck": f"{BANNER}========= ERROR SUMMARY: 0 errors\n",
}
CAPTURE = Capture(
    plugin="alphamoe_w8a8",
    symbols=(TARGET,),
    run_id=None,
    rank=0,
    rank_source="engine",
    world_size=4,
    layer=0,
    M=1,
    tensors=(),
    gpu_name=None,
    compute_capability=None,
    versions={},
    created="2026-01-01T00:00:00Z",
    bytes=0,
)
LAUNCHED = ReplayResult(status="launched", symbols=(TARGET,), launches=1, device="H200", caching_allocator=False)
EQUAL = OutputCheck(verdict="PASS")

_PRELUDE = """\
import os, signal, subprocess, sys, time
def after(name):
    text = sys.argv[sys.argv.index(name) + 1].replace("%%", "\\0").replace("%p", str(os.getpid()))
    return text.replace("\\0", "%")
def log(text):
    with open(after("--log-file"), "a") as stream:
        stream.write(text)
def xml(records=0, root="ComputeSanitizerOutput", record="<record><kind>Memcheck</kind></record>"):
    with open(after("--save"), "w") as stream:
        stream.write("<?xml version='1.0'?><%s>%s</%s>" % (root, record * records, root))
def result():
    with open(RESULT, "wb") as stream:
        stream.write(RESULT_BYTES)
if "--version" in sys.argv:
    print("Version " + VERSION)
    sys.exit(0)
"""


def make_tool(
    folder: Path, body: str, *, result: ReplayResult | None = LAUNCHED, version: str = "2025.3.1.0"
) -> ToolPath:
    """Write a fake tool: ``body`` is Python that may call ``log``, ``xml`` and ``result``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "compute-sanitizer"
    facts = f"RESULT = {str(folder / 'result.json')!r}\nRESULT_BYTES = {msgspec.json.encode(result)!r}\n"
    path.write_text(f"#!{sys.executable} -IS\nVERSION = {version!r}\n{facts}{_PRELUDE}{body}\n")
    path.chmod(0o755)
    return ToolPath(path, version, file_state(path))


def run_fake(
    folder: Path,
    tool: Tool,
    body: str,
    *,
    symbols: tuple[str, ...] = (TARGET,),
    timeout_s: float = 20.0,
    result: ReplayResult | None = LAUNCHED,
    version: str = "2025.3.1.0",
) -> ToolRun:
    """Run a fake tool as a replay would run the real one."""
    return run_tool(
        tool,
        ["program", "--of", "the", "replay"],
        tool_path=make_tool(folder, body, result=result, version=version),
        folder=folder / "run",
        symbols=symbols,
        timeout_s=timeout_s,
        result_file=folder / "result.json",
    )


def body_of(text: str, *, code: int = 0, records: int = 0) -> str:
    """Give a fake tool's body: it logs a text, writes so many XML records, and exits."""
    return f"result(); log({text!r}); xml({records}); sys.exit({code})"


def caught(tool: Tool) -> ControlReport:
    """Give the controls of a tool that sees what it should."""
    outcome = ControlOutcome(
        control="block_barrier",
        mechanism="block barrier",
        tool=tool,
        meant_for=True,
        basic=True,
        caught=True,
        sound_clean=True,
    )
    return ControlReport(tool=tool, outcomes=(outcome,), device="H200")

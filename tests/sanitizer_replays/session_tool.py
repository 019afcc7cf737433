"""A stand-in for compute-sanitizer in whole sessions: it plays control processes and replays without a GPU.

``behaviour.json`` beside the script says how it misbehaves: ``miss`` and ``flag`` (kernels, as
``racecheck:planted_X``), ``leak`` (tools whose filter lets everything through), ``fault`` (tools that find a race in
the target), ``other_build`` (tools whose replays launched another cubin), ``hang`` (a word of the replay's
specification path, or ``TOOL:controls``), ``told`` (what every replay says of itself otherwise).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

FOUND = {
    "racecheck": "========= Error: Race reported between Write access at void {function}+0xa0 in planted_faults.cu:18\n"
    "=========     and Read access at void {function}+0xb0 in planted_faults.cu:20 [1024 hazards]\n========= \n",
    "memcheck": "========= Invalid __global__ write of size 4 bytes\n=========     at void {function}+0x70 in p.cu:2\n"
    "=========     by thread (255,0,0) in block (0,0,0)\n=========     Address 0x7f0116ab2000 is out of bounds\n"
    "=========         Device Frame: {kernel}+0x10 in p.cu:9\n========= \n",
    "synccheck": "========= Barrier error detected. Divergent thread(s) in warp.\n"
    "=========     at void {function}+0x70 in planted_faults.cu:25\n"
    "=========     by thread (96,0,0) in block (0,0,0)\n"
    "=========         Device Frame: {kernel}+0x10 in planted_faults.cu:280\n========= \n",
    "initcheck": "========= Uninitialized __global__ memory read of size 4 bytes\n"
    "=========     at void {function}+0x30 in p.cu:6\n"
    "=========     by thread (255,0,0) in block (0,0,0)\n=========     Address 0x7f0116ab2000\n"
    "=========         Device Frame: {kernel}+0x10 in p.cu:93\n========= \n",
}
RECORD = "<record><kind>Other</kind><what><text>found</text></what></record>"
SWITCHES = ("--xml",)


def main(argv: list[str]) -> int:
    """Do what the tool would: run, log, exit with the code for findings."""
    if argv == ["--version"]:
        print("NVIDIA (R) Compute Sanitizer\nVersion 2025.3.1.0 (build 1) (public-release)")
        return 0
    options: dict[str, list[str]] = {}
    while argv[0].startswith("--"):
        name = argv.pop(0)
        options.setdefault(name, []).append("" if name in SWITCHES else argv.pop(0))
    tool, filters = options["--tool"][0], [text.split("=")[1] for text in options.get("--kernel-name", [])]
    behaviour = json.loads(Path(__file__).with_name("behaviour.json").read_text())
    log = Path(options["--log-file"][0])
    log.write_text("========= COMPUTE-SANITIZER\n")
    module, rest = argv[argv.index("-m") + 1], argv[argv.index("-m") + 2 :]
    hang = behaviour.get("hang", "")
    if hang and (hang in rest[0] if module.endswith(".replays.process") else hang == f"{tool}:controls"):
        time.sleep(60)
    play = _controls if module.endswith(".controls.process") else _replay
    found = play(tool, filters, rest, behaviour)
    text = "".join(FOUND[tool].format(function=function, kernel=kernel) for function, kernel in found)
    count, plural = len(found), "" if len(found) == 1 else "s"
    summary = f"ERROR SUMMARY: {count} error{plural}"
    if tool == "racecheck":
        summary = f"RACECHECK SUMMARY: {count} hazard{plural} displayed ({count} error{plural}, 0 warnings)"
    with log.open("a") as stream:
        stream.write(f"{text}========= {summary}\n")
    records = f"<ComputeSanitizerOutput>{RECORD * count}</ComputeSanitizerOutput>"
    Path(options["--save"][0]).write_text(f'<?xml version="1.0" encoding="utf-8"?>\n{records}\n')
    return int(options["--error-exitcode"][0]) if found else 0


def _controls(tool: str, filters: list[str], rest: list[str], behaviour: dict[str, list[str]]) -> list[tuple[str, str]]:
    from alphamoe_sanitizer_replays.controls.table import BY_NAME, CANARIES

    result, canary, *kernels = rest
    found: list[tuple[str, str]] = []
    launched: list[str] = []
    for kernel in kernels:
        seen = tool in behaviour.get("leak", []) or any(part in kernel for part in filters)
        name = kernel.split("_", 1)[1] if kernel.startswith(("planted_", "sound_")) else CANARIES[tool][0]
        faulty = not kernel.startswith("sound_") and tool in BY_NAME[name].meant_for
        faulty = (
            faulty and f"{tool}:{kernel}" not in behaviour.get("miss", [])
        ) or f"{tool}:{kernel}" in behaviour.get("flag", [])
        launched.append(kernel)
        if seen and faulty:
            found.append((f"{name}<(bool)1>(float *)", kernel))
    Path(result).write_text(json.dumps({"launched": launched, "device": "fake", "absent": []}))
    assert canary == "-" or ":" in canary
    return found


def _replay(tool: str, filters: list[str], rest: list[str], behaviour: dict[str, Any]) -> list[tuple[str, str]]:
    spec = json.loads(Path(rest[0]).read_text())
    result = Path(spec["result"])
    shutil.copy(Path(spec["capture"]) / "tensors.safetensors", result.with_name("replay.outputs.safetensors"))
    told = {
        "status": "launched",
        "symbols": json.loads((Path(spec["capture"]) / "capture.json").read_text())["symbols"],
        "launches": None if behaviour.get("unknown_launches") else 1,
        "variant": spec["variant"],
        "source_sha256": "5" * 64,
        "cubin_sha256": ("a" if tool in behaviour.get("other_build", []) else "c") * 64,
        "device": "fake",
        "caching_allocator": "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ,
        "timings_s": {"process_start": 1.5, "imports": 2.0, "launch": 0.25},
        "outputs": "replay.outputs.safetensors",
    }
    result.write_text(json.dumps(told | behaviour.get("told", {})))
    return [("wait(int)", filters[0])] if tool in behaviour.get("fault", []) else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

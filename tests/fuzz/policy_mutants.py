"""Mutants of policies: text damaged without a plan, and questions that must not be answered with PASS."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

from damage import damaged_bytes
from judge import Mutant

sys.path.append(str(Path(__file__).resolve().parents[1] / "profiler"))
import golden

SYMBOL = "kernel_alpha_moe_w8a8_up_down"
POLICY = f"""\
schema = "alphamoe-trace-policy-v1"
name = "experts"
world_size = 2
executions = ["eager", "prefill_graph_replay", "decode_graph_replay"]
purposes = ["witness"]

[versions]
alphamoe-trace = ["0.1.*"]

[[require]]
symbol = "{SYMBOL}"
equals_receipts = true
per_layer = 1
equal_across_ranks = true
source_sha256 = ["{golden.SOURCE}"]

[require.M]
within = [[1, 512]]
of = "kernel"

[[require]]
symbol = '^{SYMBOL}$'
match = "regex"
at_least = 2
ranks = [0, 1]
executions = ["eager"]

[[forbid]]
symbols = ["fused_moe_kernel", "fused_moe_kernel_gptq_awq"]
match = "triton"

[[dispatch]]
kernel = "alphamoe_fp8_block_scale_aligned_moe"
at_least = 1

[[known_gap]]
symbol = "fused_moe_kernel"
reason = "issue 41"
expires = 2099-12-31

[[class]]
name = "mine.gemm"
base = ["^my_gemm"]
"""
WORDS = (
    "require", "forbid", "dispatch", "known_gap", "class", "symbol", "symbols", "match", "executions", "ranks",
    "at_least", "exactly", "per_layer", "equals_receipts", "equal_across_ranks", "M", "within", "exact", "of",
    "source_sha256", "module_sha256", "purposes", "world_size", "versions", "backend", "expires", "reason", "name",
    "base", "full", "conditional_graphs", "schema",
)  # fmt: skip
VALUES = (
    "true", "false", "0", "1", "-1", "99999999999999999999", "1e400", "nan", "inf", '""', '"x"', "[]", "[[]]", "{}",
    '["any"]', '"all"', "[0]", "[-1]", "[0, 0]", "[5]", '["eager"]', '["eager", "any"]', "[[1, 512]]", "[[512, 1]]",
    "[[1]]", "[1, 2]", "2099-12-31", "1970-01-01", "2026-02-30", "12:00:00", '"regex"', '"class"', '"full"',
    '"mangled"', '"triton"', '"moe.*"', '"(a+)+$"', '"["', '"(?P<"', '"."', '".*"', '"\\u001b[31m"',
    '"\\n::error::x"', "'''x'''", '"triton"', '"nothing"', '"warmup"', '["warmup"]', f'"{SYMBOL}"',
    f'"{"k" * 4000}"', "9" * 5000, "[" * 500, '"real_tokens"', '"dispatch"',
)  # fmt: skip


def make(rng: random.Random, folder: Path) -> Mutant:
    """Write one mutant into an empty folder."""
    if rng.random() < 0.2:
        kind = rng.choice(list(REMOVALS))
        return _gated(folder, f"policy: {kind}", REMOVALS[kind](rng, POLICY).encode(), True)
    kind = rng.choice(("bytes", "lines", "values", "values", "keys"))
    if kind == "bytes":
        content = damaged_bytes(rng, POLICY.encode())
    else:
        content = "\n".join(_edited(rng, kind, POLICY.split("\n"))).encode()
    return _gated(folder, f"policy: {kind}", content, False)


def untouched(folder: Path) -> Mutant:
    """The sound seed, which must be a PASS."""
    return _gated(folder, "policy: sound", POLICY.encode(), False)


def _edited(rng: random.Random, kind: str, lines: list[str]) -> list[str]:
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(lines))
        if kind == "lines":
            rng.choice(_LINE_ACCIDENTS)(rng, lines, at)
            if not lines:
                return [""]
        elif kind == "values":
            places = [number for number, line in enumerate(lines) if "=" in line]
            if places:
                own = rng.choice(places)
                lines[own] = f"{lines[own].split('=')[0]}= {rng.choice(VALUES)}"
        else:
            lines[at] = f"{rng.choice(WORDS)} = {rng.choice(VALUES)}"
    return lines


def _lose(rng: random.Random, lines: list[str], at: int) -> None:
    del lines[at : at + rng.choice((1, 1, 4))]


def _double(rng: random.Random, lines: list[str], at: int) -> None:
    lines[at:at] = lines[at : at + rng.choice((1, 6))] * rng.choice((1, 1, 40))


def _swap(rng: random.Random, lines: list[str], at: int) -> None:
    other = rng.randrange(len(lines))
    lines[at], lines[other] = lines[other], lines[at]


_LINE_ACCIDENTS: tuple[Callable[[random.Random, list[str], int], None], ...] = (_lose, _double, _swap)


@lru_cache(maxsize=1)
def _run() -> Path:
    return golden.build(Path(mkdtemp(prefix="alphamoe-fuzz-policy-")) / "run", world_size=2)


def _gated(folder: Path, kind: str, content: bytes, removed: bool) -> Mutant:
    path = folder / "policy.toml"
    path.write_bytes(content)
    return Mutant(kind, ("gate", str(_run()), "--policy", str(path)), removed=removed)


Removal = Callable[[random.Random, str], str]


def _no_rule(rng: random.Random, text: str) -> str:
    """Without a rule about a symbol nothing is witnessed, whatever else is asked."""
    blocks = re.split(r"\n(?=\[)", text)
    kept = [own for own in blocks if not own.startswith(("[[require]]", "[require.", "[[forbid]]"))]
    return "\n".join(own for own in kept if rng.random() < 0.7 or own.startswith("schema"))


def _misspelt(rng: random.Random, text: str) -> str:
    return text.replace(f'"{SYMBOL}"', f'"{SYMBOL[: rng.randrange(6, len(SYMBOL))]}"')


def _unknown_key(rng: random.Random, text: str) -> str:
    keys = re.findall(r"^(\w+) =", text, re.MULTILINE)
    key = rng.choice(keys)
    return re.sub(rf"^{key} =", f"{key}{rng.choice('sxq_')} =", text, count=1, flags=re.MULTILINE)


def _replaced(old: str, *new: str) -> Removal:
    return lambda rng, text: text.replace(old, rng.choice(new), 1)


def _added(*lines: str) -> Removal:
    return lambda rng, text: text.replace("equals_receipts = true", rng.choice(lines), 1)


REMOVALS: dict[str, Removal] = {
    "no rule": _no_rule,
    "a misspelt symbol": _misspelt,
    "an unknown key": _unknown_key,
    "a count that is not so": _added(
        "exactly = 5", "exactly = 1", "at_least = 7", "per_layer = 2\nequals_receipts = true"
    ),
    "another code": _replaced(golden.SOURCE, "ab" * 32, "00" * 32),
    "another world": _replaced("world_size = 2", "world_size = 1", "world_size = 3", "world_size = 8"),
    "M outside the set": _replaced("within = [[1, 512]]", "within = [[2, 512]]", "exact = [1]", "at_least = [64]"),
    "forbidden ran": _replaced('"fused_moe_kernel_gptq_awq"', f'"{golden.NORM}"', f'"{golden.ALL_REDUCE}"'),
    "an expired gap": _replaced("2099-12-31", "2020-01-01", "1999-12-31"),
    "a gap without a reason": _replaced('reason = "issue 41"', 'reason = ""', ""),
    "traffic that never counts": _replaced(
        'purposes = ["witness"]', 'purposes = ["warmup"]', "purposes = []", 'purposes = ["accuracy"]'
    ),
    "required and forbidden": _replaced('symbols = ["fused_moe_kernel",', f'symbols = ["{SYMBOL}",'),
    "a regex that tells nothing": _replaced(f"'^{SYMBOL}$'", "''", "'.*'", "'x?'", "'('"),
    "another operator": _replaced("alphamoe_fp8_block_scale_aligned_moe", "fused_experts", "alphamoe_nvfp4"),
    "a rank that is not there": _replaced("ranks = [0, 1]", "ranks = [0, 2]", "ranks = []", "ranks = [7]"),
}

"""Check the engine on one GPU: eager against graph replay, full graphs against graphs cut at the collectives.

    python tests/gpu/engine_check.py [--layers 4] [--json FILE]

World size 1, geometry qwen3-next-80b, bfloat16. Three prompts are prefilled (one graph size each) and decoded together
(three requests in the graph of four rows). Logits are compared under teacher forcing, token by token, on the same
KV cache, beside the difference between two eager runs: the fused kernel adds in no fixed order, so that even those
differ. Decode that ran ahead is checked token by token: each token that it gave, fed back in the synchronous order
(fill, run, read), must be followed by the next one that it gave, unless two choices were nearly equal. Exits 1 when a
bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / room) for room in ("backend", "tracers")]

import torch  # noqa: E402

from alphamoe_backend.capture_sizes import GraphKind  # noqa: E402
from alphamoe_backend.dispatch import DispatchRecorder  # noqa: E402
from alphamoe_backend.engine import Engine, EngineConfig, NoObserver, Request  # noqa: E402
from alphamoe_backend.inputs import StaticInputs  # noqa: E402
from alphamoe_backend.parallel import TensorParallelGroup  # noqa: E402
from alphamoe_tracers.records import EXECUTIONS, Receipt  # noqa: E402

LENGTHS = (904, 37, 300)
BUCKETS = (960, 48, 320)
DECODE_ROWS = 4
NEW_TOKENS = 32
FORCED_STEPS = 12
NOISE_FACTOR = 3.0
"""A replay may differ from an eager run by this many times what two eager runs differ by,"""
NOISE_FLOOR = 0.02
"""or by this relative error of the logits, whichever is larger."""
PREFILL_BAR = 0.15
"""Relative error between a padded and an unpadded prefill, whose GEMMs have other shapes and so round otherwise."""
CLEAR_GAP = 0.3
"""Best and second logit this far apart: then the greedy token must be the same. Logits have about unit spread; those of
two eager runs differ by 0.03 (RMS), by 0.3 at most over the vocabulary."""


def requests() -> list[Request]:
    """Give three prompts of made-up tokens."""
    generator = torch.Generator().manual_seed(17)
    return [
        Request(f"prompt{index}", tuple(torch.randint(32768, (length,), generator=generator).tolist()))
        for index, length in enumerate(LENGTHS)
    ]


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Give the Frobenius norm of the difference over that of ``wanted``."""
    return float((found - wanted).norm() / wanted.norm())


class Bench:
    """One prepared engine, driven forward by forward."""

    def __init__(self, layers: int, backend: str, *, break_graphs: bool) -> None:
        config = EngineConfig(
            model="qwen3-next-80b",
            layers=layers,
            rank=0,
            world_size=1,
            device="cuda:0",
            dtype="bfloat16",
            moe_runner_backend=backend,
            executions=EXECUTIONS,
            max_new_tokens=NEW_TOKENS,
            break_graphs=break_graphs,
        )
        self.receipts: list[Receipt] = []
        self.recorder = DispatchRecorder("check", 0, self.receipts.append)
        torch.cuda.reset_peak_memory_stats()
        self.engine = Engine(config, self.recorder, NoObserver(), TensorParallelGroup())
        self.engine.load()
        self.engine.warm_up()
        self.engine.capture(LENGTHS, batch_size=len(LENGTHS))

    def logits(self, kind: GraphKind, ids: list[int], positions: list[int], slots: list[int], *, replay: bool) -> Any:
        """Run one forward and give its real logits on the host, float32."""
        runner = self.engine._runner
        assert runner is not None
        if replay:
            rows = DECODE_ROWS if kind == "decode" else BUCKETS[LENGTHS.index(len(ids))]
            captured = runner.captured[kind, rows]
            captured.inputs.fill(ids, positions, slots)
            captured.graph.replay()
            logits = captured.output.logits
        else:
            inputs: StaticInputs = self.engine._inputs(kind, len(ids))
            inputs.fill(ids, positions, slots)
            logits = self.engine.forward(inputs).logits
        return logits[: len(ids) if kind == "decode" else 1].float().cpu()

    def prefill(self, replay: bool) -> torch.Tensor:
        """Prefill all prompts, one slot each, and give their logits [3, vocab]."""
        found = []
        for slot, request in enumerate(requests()):
            ids = list(request.prompt_ids)
            found.append(self.logits("prefill", ids, list(range(len(ids))), [slot] * len(ids), replay=replay))
        return torch.cat(found)

    def forced(self, tokens: list[tuple[int, ...]], replay: bool, steps: int = FORCED_STEPS) -> torch.Tensor:
        """Decode given tokens after the prompts and give logits [steps, 3, vocab]."""
        return torch.stack(
            [
                self.logits(
                    "decode",
                    [line[step] for line in tokens],
                    [length + step for length in LENGTHS],
                    [0, 1, 2],
                    replay=replay,
                )
                for step in range(steps)
            ]
        )

    def slips_of_running_ahead(
        self, tokens: list[tuple[int, ...]], *, prefill_replay: bool, replay: bool
    ) -> tuple[int, int]:
        """Feed back what decode that ran ahead gave, in the synchronous order.

        Returns:
            How many of its tokens were not the greedy choice then, and how many were worse than it by more than
            :data:`CLEAR_GAP`.
        """
        first = self.prefill(prefill_replay)[None]
        logits = torch.cat([first, self.forced(tokens, replay, NEW_TOKENS - 1)])
        chosen = torch.tensor(tokens).T
        best, greedy = logits.max(dim=-1)
        behind = best - logits.gather(-1, chosen[..., None]).squeeze(-1)
        return int((greedy != chosen).sum()), int((behind > CLEAR_GAP).sum())

    def close(self) -> None:
        """Give the memory back."""
        self.engine.close()
        del self.engine
        gc.collect()
        torch.cuda.empty_cache()


def token_slips(found: torch.Tensor, wanted: torch.Tensor) -> tuple[int, int]:
    """Count greedy choices that differ, and those of them where the wanted choice was clear."""
    best = wanted.topk(2, dim=-1).values
    differs = found.argmax(-1) != wanted.argmax(-1)
    clear = best[..., 0] - best[..., 1] > CLEAR_GAP
    return int(differs.sum()), int((differs & clear).sum())


def first_divergence(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    """Give the first place where two token lists differ."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


@torch.inference_mode()
def check(layers: int, backend: str) -> tuple[dict[str, Any], list[str]]:
    """Run everything and give the numbers and the missed bars."""
    missed: list[str] = []
    numbers: dict[str, Any] = {"layers": layers, "backend": backend}
    bench = Bench(layers, backend, break_graphs=False)
    engine = bench.engine
    completions = engine.serve(requests(), EXECUTIONS)
    eager, replayed = ([c.token_ids for c in completions[first : first + 3]] for first in (0, 3))
    numbers["first divergence of free-running tokens"] = [
        first_divergence(a, b) for a, b in zip(eager, replayed, strict=True)
    ]
    numbers["distinct tokens of 32"] = [len(set(line)) for line in eager]
    if min(numbers["distinct tokens of 32"]) < NEW_TOKENS // 2:
        missed.append("greedy tokens hardly vary: activations are degenerate")
    numbers["decode ms a step, eager / full graph"] = [
        round(completions[first].timings["decode_s"] * 1e3 / (NEW_TOKENS - 1), 3) for first in (0, 3)
    ]
    served = {(r.execution, r.M, r.real_tokens) for r in bench.receipts if r.purpose == "witness"}
    wanted = {("eager", n, n) for n in (*LENGTHS, 3)} | {("decode_graph_replay", DECODE_ROWS, 3)}
    wanted |= {("prefill_graph_replay", M, n) for M, n in zip(BUCKETS, LENGTHS, strict=True)}
    if served != wanted:
        missed.append(f"receipts show {sorted(served ^ wanted)} more or less than served")

    def check_run_ahead(name: str, bench: Bench, tokens: list[tuple[int, ...]], **replays: bool) -> None:
        slips, clear_slips = bench.slips_of_running_ahead(tokens, **replays)
        numbers[f"run ahead, {name}"] = {
            "tokens": NEW_TOKENS * len(tokens),
            "differ": slips,
            "of them clear": clear_slips,
        }
        if clear_slips:
            missed.append(f"run ahead, {name}: {clear_slips} tokens are not what the synchronous order gives")

    if not engine.run_ahead:
        missed.append("decode did not run ahead")
    check_run_ahead("eager", bench, eager, prefill_replay=False, replay=False)
    check_run_ahead("full graph", bench, replayed, prefill_replay=True, replay=True)
    ahead = [(r.request_ids, r.execution, r.M, r.real_tokens) for r in bench.receipts if r.purpose == "witness"]
    bench.receipts.clear()
    engine.run_ahead = False
    completions = engine.serve(requests(), EXECUTIONS)
    engine.run_ahead = True
    numbers["decode ms a step, reading at once, eager / full"] = [
        round(completions[first].timings["decode_s"] * 1e3 / (NEW_TOKENS - 1), 3) for first in (0, 3)
    ]
    numbers["run ahead: first divergence from reading at once"] = [
        first_divergence(a, b.token_ids) for a, b in zip([*eager, *replayed], completions, strict=True)
    ]
    if [(r.request_ids, r.execution, r.M, r.real_tokens) for r in bench.receipts] != ahead:
        missed.append("receipts differ between running ahead and reading at once")

    bench.prefill(replay=False)
    forced_again = bench.forced(eager, replay=False)
    prefill_eager = bench.prefill(replay=False)
    forced_eager = bench.forced(eager, replay=False)
    forced_full = bench.forced(eager, replay=True)
    prefill_replayed = bench.prefill(replay=True)
    if not all(torch.isfinite(t).all() for t in (forced_eager, forced_full, prefill_eager, prefill_replayed)):
        missed.append("logits are not finite")
    noise = relative_error(forced_again, forced_eager)
    numbers["logits: rms, eager twice (relative error)"] = [round(float(forced_eager.std()), 3), noise]
    allowed = max(NOISE_FACTOR * noise, NOISE_FLOOR)

    def compare(name: str, found: torch.Tensor, reference: torch.Tensor, bar: float) -> None:
        error = relative_error(found, reference)
        slips, clear_slips = token_slips(found, reference)
        largest = float((found - reference).abs().max())
        numbers[name] = {"relative": error, "max": largest, "tokens differ": slips, "of them clear": clear_slips}
        if not error <= bar:
            missed.append(f"{name}: relative error {error:.4f} > {bar:.4f}")
        if clear_slips and bar < PREFILL_BAR:
            missed.append(f"{name}: {clear_slips} clear greedy choices differ")

    compare("decode, full graph against eager", forced_full, forced_eager, allowed)
    compare("prefill, padded replay against eager", prefill_replayed, prefill_eager, PREFILL_BAR)
    numbers["memory GiB, peak / KV cache"] = [
        round(torch.cuda.max_memory_allocated() / 2**30, 2),
        round(engine._cache.size_bytes / 2**30, 3) if engine._cache else None,
    ]
    numbers["wall_s"] = {phase: round(seconds, 2) for phase, seconds in engine.wall_s.items()}
    numbers["notes"] = engine.notes
    bench.close()

    bench = Bench(layers, backend, break_graphs=True)
    runner = bench.engine._runner
    assert runner is not None
    segments = runner.captured["decode", DECODE_ROWS].graph.segments
    numbers["decode segments, cut at the all-reduces"] = segments
    if segments != 2 * layers + 1:
        missed.append(f"{segments} segments instead of {2 * layers + 1}")
    bench.prefill(replay=False)
    compare("decode, cut graph against eager", bench.forced(eager, replay=True), forced_eager, allowed)
    completions = bench.engine.serve(requests(), ("decode_graph_replay",))
    check_run_ahead("cut graph", bench, [c.token_ids for c in completions], prefill_replay=False, replay=True)
    numbers["decode ms a step, cut graph"] = round(completions[0].timings["decode_s"] * 1e3 / (NEW_TOKENS - 1), 3)
    bench.close()
    return numbers, missed


def main() -> int:
    """Print the table, write the JSON, and say which bars were missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--moe-runner-backend", default="flashinfer_alphamoe")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("engine_check needs a CUDA device")
    begun = time.perf_counter()
    numbers, missed = check(arguments.layers, arguments.moe_runner_backend)
    numbers["seconds"] = round(time.perf_counter() - begun, 1)
    numbers["gpu"], numbers["torch"] = torch.cuda.get_device_name(), torch.__version__
    for name, value in numbers.items():
        shown = value if not isinstance(value, dict) else "  ".join(f"{key} {item}" for key, item in value.items())
        print(f"{name:48} {shown}")
    for line in missed:
        print(f"MISSED  {line}")
    print("engine check:", "FAILED" if missed else "passed")
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers | {"missed": missed}, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

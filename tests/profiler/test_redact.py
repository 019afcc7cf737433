"""Secrets do not reach a bundle, and what is no secret is left readable."""

from __future__ import annotations

import pytest

from alphamoe_profiler.redact import REDACTED, names_a_secret, redact_argv, redact_environment, redact_text

PLANTED = "s3cr3tValue"


@pytest.mark.parametrize(
    "argv",
    [
        ["--api-key", PLANTED],
        [f"--api-key={PLANTED}"],
        ["--hf-token", PLANTED],
        [f"--hf_token={PLANTED}"],
        ["--password", PLANTED],
        ["--token", f"-{PLANTED}"],
        [f"HF_TOKEN={PLANTED}"],
        [f"--userPassword={PLANTED}"],
        ["-H", f"Authorization: Bearer {PLANTED}"],
        ["--header", f"x-api-key: {PLANTED}"],
        [f"https://user:{PLANTED}@host/path"],
        [f"https://{PLANTED}@host/path"],
        [f"http://host/path?a=1&api_key={PLANTED}&b=2"],
        ["--prompt", f"text:my key is sk-{PLANTED}123456"],
        [f"hf_{PLANTED}abcdef"],
    ],
)
def test_a_secret_in_an_argument_is_not_written(argv: list[str]) -> None:
    clean = redact_argv(argv)
    assert PLANTED not in " ".join(clean)
    assert REDACTED in " ".join(clean)
    assert len(clean) == len(argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["alphamoe-trace", "--ranks", "4", "--prompt", "gsm8k:17", "--max-new-tokens", "32"],
        ["--tokenizer", "v3", "--max-tokens=5", "--seed", "7"],
        ["--api-key", "--ranks", "4"],
        ["https://host/path?row=3#part", "file:/home/user/keys.txt"],
    ],
)
def test_arguments_without_secrets_stay_as_they_are(argv: list[str]) -> None:
    assert redact_argv(argv) == tuple(argv)


def test_only_the_secret_part_of_a_text_goes() -> None:
    assert redact_text("get http://h/p?token=abc&row=3 now") == f"get http://h/p?token={REDACTED}&row=3 now"
    assert redact_text("https://me:pw@host:80/x") == f"https://{REDACTED}@host:80/x"


def test_variables_are_sorted_and_judged_by_name_and_by_value() -> None:
    clean = redact_environment(
        {"NCCL_DEBUG": "INFO", "CUDA_TOKEN": PLANTED, "ALPHAMOE_URL": f"https://u:{PLANTED}@h", "ALPHAMOE_TOKEN": ""}
    )
    assert list(clean) == ["ALPHAMOE_TOKEN", "ALPHAMOE_URL", "CUDA_TOKEN", "NCCL_DEBUG"]
    assert clean["NCCL_DEBUG"] == "INFO"
    assert clean["ALPHAMOE_TOKEN"] == ""
    assert PLANTED not in "".join(clean.values())


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "--max-new-tokens", "AUTHOR", "--keyboard", "monkey"])
def test_a_name_that_only_resembles_a_secret_is_none(name: str) -> None:
    assert not names_a_secret(name)

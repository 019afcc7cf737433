"""Policies: strict reading with lines and nearest keys, what symbols match, and empty or contradictory questions."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from alphamoe_profiler.policy import ClassRule, MatchKind, policy_schema
from alphamoe_profiler.policy_check import policy_problems
from alphamoe_profiler.policy_match import Selector
from alphamoe_profiler.policy_source import builtin_names, builtin_policy, load_policy, parse_policy
from alphamoe_tracers.errors import UsageError
from alphamoe_tracers.symbols import base_name

DOCS = Path(__file__).resolve().parents[2] / "docs"
TODAY = datetime.date(2026, 6, 1)
T4_NAMES = (
    "void combineKernel<half, DispatchLayout::RANK_MAJOR>(Args)",
    "void cutlass::device_kernel<ns::GroupedGemm<e4m3, 128>>(P)",
    "void cutlass::device_kernel<ns::Reduce<f32>>(P)",
    "moe_scatter4(float*, int)",
    "fused_moe_kernel",
    "fused_moe_kernel_gptq_awq",
    "fused_moe_kernel_0d1d2de3",
    "void cutlass::Kernel<cutlass_80_tensorop_s16…",
)


def problems(text: str, world_size: int = 4) -> list[str]:
    return [own.text for own in policy_problems((parse_policy(text, "p"),), world_size, TODAY)]


@pytest.mark.parametrize(
    ("symbol", "match", "expected"),
    [
        ("dispatch", "base", 0),
        ("GroupedGemm", "full", 1),
        ("device_kernel", "base", 2),
        ("fused_moe_kernel", "base", 1),
        ("fused_moe_kernel", "triton", 2),
        ("moe", "full", 0),
        ("Dispatch", "full", 0),
        (r"^void cutlass::device_kernel<ns::\w+<", "regex", 2),
        ("moe.gemm", "class", 3),
        ("moe.*", "class", 3),
        ("void cutlass::device_kernel<ns::Reduce<f32>>(P)", "full", 1),
    ],
)
def test_a_rule_matches_one_form_of_the_name_and_never_a_part_of_an_identifier(
    symbol: str, match: MatchKind, expected: int
) -> None:
    selector = Selector(symbol, match)
    forms = [base_name(name) if selector.form == "base" else name for name in T4_NAMES]
    assert sum(selector.matches(name) for name in forms) == expected


def test_a_cut_name_may_hide_what_it_could_have_been_and_nothing_else() -> None:
    cut = T4_NAMES[-1]
    assert not Selector("fused_moe_kernel").may_be(cut)  # its base name is whole: Kernel
    assert Selector("Kernel").may_be(cut)
    assert Selector("GroupedGemm", "full").may_be(cut)
    assert Selector("_Z12moe_scatter4PfiE", "mangled").may_be("_Z12moe_sca...")
    assert not Selector("_Z12moe_scatter4PfiE", "mangled").may_be("_Z12moe_gem...")


def test_a_class_of_the_policys_own_is_looked_up_before_the_packaged_ones() -> None:
    own = (ClassRule(name="ours.gemm", base=("^fused_moe_kernel$",)),)
    assert Selector("ours.gemm", "class", own).matches("fused_moe_kernel")
    assert not Selector("moe.gemm", "class", own).matches("fused_moe_kernel")


@pytest.mark.parametrize(
    ("text", "line", "told", "hint"),
    [
        ('world_size = 4\n\n[[require]]\nsymbl = "x"\n', 4, "unknown key 'symbl'", "did you mean 'symbol'?"),
        ("world_sise = 4\n", 1, "unknown key 'world_sise'", "did you mean 'world_size'?"),
        ('[[require]]\nsymbol = "x"\n\n[[require]]\nsymbol = "y"\nat_least = 0\n', 6, "at_least", ""),
        ('[[require]]\nsymbol = "x"\n[require.M]\nexat = [1]\n', 3, "unknown key 'exat'", "did you mean 'exact'?"),
        ('[[known_gap]]\nsymbol = "x"\nexpires = 2027-01-01\n', 1, "reason", ""),
        ('[[known_gap]]\nsymbol = "x"\nreason = "r"\n', 1, "expires", ""),
        ('[[require]]\nsymbol = "x"\nat_least = true\n', 3, "at_least", ""),
        ('[[require]]\nsymbol = "x"\npurposes = ["warmup"]\n', 3, "warmup", ""),
        ('[[forbid]]\nsymbol = "x"\nmatch = "substring"\n', 3, "substring", ""),
        ("require = 3\n", 1, "require", ""),
    ],
)
def test_a_mistake_is_told_with_its_line_and_the_nearest_key(text: str, line: int, told: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_policy(text, "policy.toml")
    assert str(caught.value).startswith(f"policy.toml:{line}: ")
    assert told in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize("text", ["x =", "[[require]\n", 'a = "\\z"', "= 3", "\x00"])
def test_what_is_no_toml_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"policy\.toml"):
        parse_policy(text, "policy.toml")


def test_a_pyproject_holds_a_policy_in_its_own_table_and_lines_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(
        '[project]\nname = "x"\n\n[tool.alphamoe-trace.witness]\nworld_size = 4\n\n'
        '[[tool.alphamoe-trace.witness.require]]\nsymbol = "k"\n\n'
        '[[tool.alphamoe-trace.witness.forbid]]\nsymbol = "f"\n'
    )
    placed = load_policy(path)
    assert placed.policy.world_size == 4
    assert (placed.line("require", 0), placed.line("forbid", 0), placed.line("", 0)) == (7, 10, 4)
    path.write_text('[project]\nname = "x"\n')
    with pytest.raises(UsageError, match=r"no table \[tool\.alphamoe-trace\.witness\]"):
        load_policy(path)


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"#" * (5 << 20)])
def test_a_policy_that_cannot_be_read_is_a_usage_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "policy.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"policy\.toml"):
        load_policy(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("world_size = 4\n", "requires and forbids no symbol"),
        ("require = []\n", "requires and forbids no symbol"),
        ("[[dispatch]]\nat_least = 1\n", "requires and forbids no symbol"),
        ("[[require]]\nat_least = 1\n", "names no symbol"),
        ('[[require]]\nsymbol = "ns::f<int>"\n', "can match nothing"),
        ('[[require]]\nsymbol = "void f"\nmatch = "triton"\n', "can match nothing"),
        ('[[require]]\nsymbol = "cut_name..."\nmatch = "full"\n', "can match nothing"),
        ('[[require]]\nsymbol = "("\nmatch = "regex"\n', "not a regular expression"),
        ('[[require]]\nsymbol = ".*"\nmatch = "regex"\n', "matches every name"),
        ('[[require]]\nsymbol = "moe.gem"\nmatch = "class"\n', "did you mean 'moe.gemm'?"),
        ('[[require]]\nsymbol = "k"\nranks = [4]\n', "rank 4 does not exist"),
        ('[[require]]\nsymbol = "k"\nranks = []\n', "ranks is empty"),
        ('[[require]]\nsymbol = "k"\nexecutions = []\n', "executions is empty"),
        ('[[require]]\nsymbol = "k"\nat_least = 3\nexactly = 2\n', "contradict"),
        ('[[require]]\nsymbol = "k"\n[require.M]\nexact = []\n', "an empty set asks nothing"),
        ('[[require]]\nsymbol = "k"\n[require.M]\nwithin = [[9, 1]]\n', "holds nothing"),
        ('[[require]]\nsymbol = "k"\n[require.M]\nwithin = [[1, 8]]\nat_least = [9]\n', "outside every range"),
        ('[[require]]\nsymbol = "k"\n[require.M]\n', "give exact, within or at_least"),
        ('[[require]]\nsymbol = "k"\nmatch = "mangled"\nequals_receipts = true\n', "base names"),
        ('[[require]]\nsymbol = "k"\n[[forbid]]\nsymbol = "k"\n', "is required (line 1) and forbidden"),
        (
            '[[require]]\nsymbol = "k"\n[[known_gap]]\nsymbol = "k"\nreason = "r"\nexpires = 2026-05-31\n',
            "expired on 2026-05-31",
        ),
        (
            '[[require]]\nsymbol = "k"\n[[known_gap]]\nsymbol = "j"\nreason = "r"\nexpires = 2027-01-01\n',
            "no rule is about this symbol",
        ),
        ('[[require]]\nsymbol = "k"\n[[class]]\nname = "c"\nbase = ["("]\n', "not a regular expression"),
    ],
)
def test_an_empty_or_contradictory_question_is_named(text: str, told: str) -> None:
    assert any(told in own for own in problems(text)), problems(text)


def test_a_sound_policy_has_no_problem_and_a_gap_holds_on_its_last_day() -> None:
    text = '[[require]]\nsymbol = "k"\n[[known_gap]]\nsymbol = "k"\nreason = "r"\nexpires = 2026-06-01\n'
    assert problems(text) == []
    disjoint = '[[require]]\nsymbol = "k"\nranks = [0]\n[[forbid]]\nsymbol = "k"\nranks = [1]\n'
    assert problems(disjoint) == []


def test_every_built_in_policy_is_sound_and_tied_to_versions() -> None:
    assert set(builtin_names()) >= {
        "flashinfer_alphamoe", "triton", "deep_gemm", "flashinfer_cutlass", "flashinfer_trtllm", "marlin",
    }  # fmt: skip
    for name in builtin_names():
        placed = builtin_policy(name)
        assert policy_problems((placed,), 4, TODAY) == []
        assert placed.policy.versions
    with pytest.raises(UsageError, match="flashinfer_alphamo'") as caught:
        builtin_policy("flashinfer_alphamo")
    assert "did you mean 'flashinfer_alphamoe'?" in caught.value.hint


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("flashinfer_alphamoe", "kernel_alpha_moe_w8a8_up_down"),
        ("flashinfer_alphamoe", "kernel_alpha_moe_nvfp4_up_workspace_q_nvfp4_qualified_c388_up"),
        ("deep_gemm", "void deep_gemm::sm90_fp8_gemm_1d2d_impl<GemmType::MGroupedContiguous>(float*)"),
        ("flashinfer_trtllm", "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_dynBatch_sm100f"),
        (
            "flashinfer_cutlass",
            "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<S>>>(P)",
        ),
        ("marlin", "void marlin_moe_wna16::Marlin<__nv_bfloat16>(int4*)"),
    ],
)
def test_built_in_policies_know_the_kernels_of_their_backend(backend: str, name: str) -> None:
    rule = builtin_policy(backend).policy.require[0]
    assert rule.symbol is not None
    assert Selector(rule.symbol, rule.match).matches(name)
    assert not Selector(rule.symbol, rule.match).matches("void cutlass::device_kernel<flash::FlashAttnFwd<S>>(P)")


def test_the_published_schema_is_the_one_that_policies_are_read_with() -> None:
    published = json.loads((DOCS / "policy-schema.json").read_text())
    assert published == policy_schema()


def test_the_sample_of_the_documentation_is_sound() -> None:
    text = (DOCS / "gate.md").read_text()
    sample = text.partition("```toml\n")[2].partition("```")[0]
    assert problems(sample) == []
    assert len(parse_policy(sample, "p").policy.require) == 2


def test_every_key_of_a_policy_is_described() -> None:
    text = (DOCS / "gate.md").read_text()
    for definition in policy_schema()["$defs"].values():
        for key in definition["properties"]:
            assert f"`{key}`" in text, key

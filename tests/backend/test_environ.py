"""The environment registry: parsing, dynamic reads, overrides and cleanup."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from alphamoe_backend import environ
from alphamoe_tracers.errors import UsageError


@pytest.fixture
def clean() -> Iterator[None]:
    """Hide every registered variable."""
    with pytest.MonkeyPatch.context() as patch:
        for field in environ.VARIABLES:
            patch.delenv(field.name, raising=False)
        yield


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "yes", "on", " On "])
@pytest.mark.usefixtures("clean")
def test_words_for_on(text: str) -> None:
    """Every word for on switches on, in any case."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(environ.TRACE_SHAPES.name, text)
        assert environ.TRACE_SHAPES.get() is True


@pytest.mark.parametrize("text", ["0", "false", "No", "off"])
@pytest.mark.usefixtures("clean")
def test_words_for_off(text: str) -> None:
    """Every word for off switches off, also a switch that is on by default; "0" is off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(environ.NVTX.name, text)
        assert environ.NVTX.get() is False


@pytest.mark.usefixtures("clean")
def test_another_word_is_refused_by_name() -> None:
    """A switch that holds another word is a usage error that names the variable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(environ.NVTX.name, "maybe")
        with pytest.raises(UsageError, match="ALPHAMOE_TRACE_NVTX='maybe'"):
            environ.NVTX.get()
        with pytest.raises(UsageError):
            environ.registry()


@pytest.mark.usefixtures("clean")
def test_an_empty_variable_counts_as_not_set() -> None:
    """An empty variable leaves the default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(environ.NVTX.name, "")
        assert environ.NVTX.get() is True
        assert environ.NVTX.source() == "default"


@pytest.mark.usefixtures("clean")
def test_reads_are_dynamic() -> None:
    """A change of the environment is seen by the next read."""
    assert environ.GSM8K.get() == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(environ.GSM8K.name, "a.jsonl")
        assert environ.GSM8K.get() == "a.jsonl"
    assert environ.GSM8K.get() == ""


@pytest.mark.usefixtures("clean")
def test_overrides_nest_and_give_back_what_was_there() -> None:
    """Nested overrides, one of them unsetting, give back the value before, also after an exception."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(environ.RECEIPTS.name, "yes")
        with environ.RECEIPTS.override(False):
            assert environ.RECEIPTS.get() is False
            assert environ.RECEIPTS.source() == "override"
            with environ.RECEIPTS.override(None):
                assert environ.RECEIPTS.get() is True
            assert environ.RECEIPTS.get() is False
        with pytest.raises(ZeroDivisionError), environ.RECEIPTS.override(False):
            _ = 1 / 0
        assert os.environ[environ.RECEIPTS.name] == "yes"
        assert environ.RECEIPTS.source() == "environment"


@pytest.mark.usefixtures("clean")
def test_the_registry_is_sorted_and_tells_sources() -> None:
    """The snapshot holds every name in order, with value, default and where the value came from."""
    with environ.TRACE_SHAPES.override(True):
        snapshot = environ.registry()
    assert list(snapshot) == sorted(field.name for field in environ.VARIABLES)
    assert snapshot[environ.TRACE_SHAPES.name] == {"value": True, "default": False, "source": "override"}
    assert snapshot["SGLANG_FLASHINFER_ALPHAMOE_ROUTER_ONLY"]["source"] == "default"


@pytest.mark.usefixtures("clean")
def test_the_arm_file_gates_receipts_of_a_serving_process(tmp_path: Path) -> None:
    """A serving process writes receipts when the switch is "1" and only while the arm file exists."""
    arm = tmp_path / "armed"
    assert not environ.receipts_armed(serving=True)
    with environ.TRACE_SHAPES.override(True):
        assert environ.receipts_armed(serving=True)
        with environ.TRACE_ARM_FILE.override(str(arm)):
            assert not environ.receipts_armed(serving=True)
            arm.touch()
            assert environ.receipts_armed(serving=True)
            arm.unlink()
            assert not environ.receipts_armed(serving=True)


@pytest.mark.usefixtures("clean")
def test_a_traced_run_has_receipts_unless_they_are_switched_off() -> None:
    """A traced run writes receipts by default and none with ALPHAMOE_TRACE_RECEIPTS=0."""
    assert environ.receipts_armed()
    with environ.RECEIPTS.override(False):
        assert not environ.receipts_armed()

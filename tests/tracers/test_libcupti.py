"""The binding to libcupti: what it says of its environment, and what CUPTI calls back into."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alphamoe_tracers import cupti_source, libcupti
from alphamoe_tracers.activity import Kind, Layouts, record_offsets
from alphamoe_tracers.callbacks import (
    GRAPHNODE_CLONED,
    GRAPHNODE_CREATED,
    MODULE_LOADED,
    BufferPool,
    _GraphData,
    _ModuleData,
    _ResourceData,
    process_callbacks,
)
from alphamoe_tracers.cupti_source import CuptiSource
from alphamoe_tracers.graph_nodes import GraphNode
from alphamoe_tracers.libcupti import CuptiError, Libcupti, mapped_libraries
from alphamoe_tracers.source import LoadedModule, RawBuffer, SourceUnavailableError
from alphamoe_tracers.synthetic import RECORD_SIZES

MAPS = """\
7f00-7f01 r-xp 00000000 08:01 11 /usr/local/cuda-12.1/extras/CUPTI/lib64/libcupti.so.12
7f02-7f03 r--p 00000000 08:01 12 /env/site-packages/nvidia/cu13/lib/libcupti.so.13
7f04-7f05 r-xp 00001000 08:01 12 /env/site-packages/nvidia/cu13/lib/libcupti.so.13
7f06-7f07 rw-p 00000000 00:00 0 [heap]
"""


class Gathered:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.buffers: list[RawBuffer] = []
        self.nodes: list[GraphNode] = []
        self.modules: list[LoadedModule] = []
        self.put_buffer = self.buffers.append
        self.put_node = self.nodes.append
        self.put_module = self.modules.append


@pytest.fixture
def real_library() -> Libcupti:
    nvidia = pytest.importorskip("nvidia")
    found = [path for root in nvidia.__path__ for path in Path(root).glob("*/lib/libcupti.so.13")]
    if not found:
        pytest.skip("nvidia-cuda-cupti is not installed")
    return Libcupti(str(found[0]))


def test_every_mapped_libcupti_is_listed_once() -> None:
    """Two different libraries in one process show as two paths (case C4)."""
    assert mapped_libraries(MAPS) == (
        "/usr/local/cuda-12.1/extras/CUPTI/lib64/libcupti.so.12",
        "/env/site-packages/nvidia/cu13/lib/libcupti.so.13",
    )
    assert mapped_libraries("") == ()


def test_two_libraries_are_refused_with_their_paths(real_library: Libcupti) -> None:
    """The reason names both and the way out."""
    with pytest.raises(SourceUnavailableError, match=r"two libcupti are mapped.*LD_LIBRARY_PATH"):
        libcupti._only_one((real_library.path, __file__))


def test_the_library_beside_torch_is_preferred(real_library: Libcupti) -> None:
    """torch preloads the wheel's file by path, so a toolkit's copy on the search path would be a second one."""
    assert str(libcupti.packaged_library()) == real_library.path


@pytest.mark.parametrize(("status", "remedy"), [(39, "another tool"), (35, "administrators"), (8, "")])
def test_status_codes_come_with_a_remedy(status: int, remedy: str) -> None:
    """What a user can mend is said with the code (cases C1, C3)."""
    text = str(CuptiError("cuptiSubscribe", status, "NAME"))
    assert f"cuptiSubscribe failed with NAME ({status})" in text
    assert remedy in text


def test_library_gives_its_own_record_sizes(real_library: Libcupti) -> None:
    """The installed libcupti steps over made-up records exactly as the synthetic source lays them out."""
    sizes = real_library.record_sizes()
    if real_library.version() == 130001:
        assert {kind: sizes[kind] for kind in RECORD_SIZES} == RECORD_SIZES
    layouts = Layouts.choose(sizes, libcupti.exposed_kernel_dtypes())
    assert layouts.sizes[Kind.CONCURRENT_KERNEL] == sizes[Kind.CONCURRENT_KERNEL]


def test_fast_walk_agrees_with_the_library(real_library: Libcupti) -> None:
    """On a mixed buffer both find the same records."""
    rng = np.random.default_rng(5)
    sizes = real_library.record_sizes()
    kinds = rng.choice([int(kind) for kind in Kind], 500)
    data = np.concatenate([np.full(sizes[int(kind)] // 4, kind, np.uint32) for kind in kinds]).view(np.uint8)
    np.testing.assert_array_equal(record_offsets(data.view(np.uint32), sizes) * 4, real_library.record_starts(data))


def test_launch_calls_are_known_by_name(real_library: Libcupti) -> None:
    """The library names its own callbacks, those of CUDA 13's launch stubs included."""
    names = set(real_library.callback_names(2).values())
    assert {"cudaLaunchKernel_v7000", "cudaGraphLaunch_v10000", "cudaLaunchKernelExC_v11060"} <= names
    assert "cuLaunchKernelEx" in real_library.callback_names(1).values()
    assert real_library.result_name(39) == "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"


class FakeLibrary:
    """A libcupti that answers with success, or with one status for one call."""

    path = "/fake/libcupti.so.13"

    def __init__(self, refuse: str = "", status: int = 0) -> None:
        self.refuse, self.status = refuse, status
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.lost = 0

    def call(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, arguments))
        if name == self.refuse:
            raise CuptiError(name, self.status, "NAME")
        if name == "cuptiSubscribe":
            arguments[0]._obj.value = 1

    def function(self, name: str) -> Any:
        def bare(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name == "cuptiGetGraphNodeId":
                arguments[1]._obj.value = arguments[0] * 10
            if name == "cuptiGetTimestamp":
                arguments[0]._obj.value = 123
            return 0

        return bare

    def version(self) -> int:
        return 130001

    def record_sizes(self) -> dict[int, int]:
        return RECORD_SIZES

    def callback_names(self, domain: int) -> dict[int, str]:
        names = {307: "cuLaunchKernel", 8: "cuMemAlloc", 527: "cuLaunchHostFunc"}
        return names if domain == 1 else {505: "__cudaLaunchKernel_ptsz_v13000", 211: "cudaLaunchKernel_v7000"}

    def dropped(self) -> int:
        lost, self.lost = self.lost, 0
        return lost


def connected(monkeypatch: pytest.MonkeyPatch, library: FakeLibrary) -> CuptiSource:
    monkeypatch.setattr(cupti_source, "_require_device", lambda: None)
    monkeypatch.setattr(libcupti, "load", lambda: library)
    monkeypatch.setattr(libcupti, "exposed_kernel_dtypes", dict)
    return CuptiSource()


def called(library: FakeLibrary) -> list[str]:
    return [name for name, _ in library.calls]


def test_source_enables_launch_calls_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only calls that submit kernels are recorded, under their plain names, and the subscription comes first."""
    library = FakeLibrary()
    source = connected(monkeypatch, library)
    source.start(Gathered())
    assert dict(source.api_names()) == {
        (Kind.DRIVER, 307): "cuLaunchKernel",
        (Kind.RUNTIME, 505): "cudaLaunchKernel",
        (Kind.RUNTIME, 211): "cudaLaunchKernel",
    }
    assert called(library)[0] == "cuptiSubscribe"
    assert called(library).index("cuptiSetThreadIdType") < called(library).index("cuptiActivityEnable")
    library.lost = 4
    source.stop()
    assert called(library).count("cuptiActivityDisable") == called(library).count("cuptiActivityEnable") == 5
    assert (called(library)[-1], source.dropped()) == ("cuptiUnsubscribe", 4)
    source.flush(forced=True)


def test_second_subscriber_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at the subscription, the source leaves the other tool's activity kinds and buffers alone."""
    library = FakeLibrary("cuptiSubscribe", 39)
    source = connected(monkeypatch, library)
    with pytest.raises(SourceUnavailableError, match="another tool"):
        source.start(Gathered())
    assert called(library) == ["cuptiSubscribe"]


def test_refused_second_collector_leaves_the_first_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two collectors in one process: the second goes off, the first still gets its records."""
    sink, library = Gathered(), FakeLibrary()
    first = connected(monkeypatch, library)
    first.start(sink)
    second = connected(monkeypatch, FakeLibrary("cuptiSubscribe", 39))
    with pytest.raises(SourceUnavailableError):
        second.start(Gathered())
    assert process_callbacks()._sink is sink
    first.stop()
    assert process_callbacks()._sink is None


def test_ranges_that_cannot_arrive_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the injection NVTX ranges stay away, and the summary says why."""
    monkeypatch.delenv(libcupti.NVTX_INJECTION, raising=False)
    source = connected(monkeypatch, FakeLibrary())
    source.start(Gathered())
    source.stop()
    assert source.notes[0].startswith("NVTX ranges are not recorded")
    monkeypatch.setenv(libcupti.NVTX_INJECTION, FakeLibrary.path)
    source = connected(monkeypatch, FakeLibrary())
    source.start(Gathered())
    source.stop()
    assert source.notes == ()


def test_refused_kind_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the privilege to trace, what was enabled is undone and the reason says how to get it."""
    library = FakeLibrary("cuptiActivityEnable", 35)
    source = connected(monkeypatch, library)
    with pytest.raises(SourceUnavailableError, match="administrators"):
        source.start(Gathered())
    assert "cuptiActivityDisable" not in called(library)


def test_refused_launch_ids_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id that this library refuses is skipped by name, the others stay."""
    source = connected(monkeypatch, FakeLibrary("cuptiActivityEnableDriverApi", 1))
    source.start(Gathered())
    assert source.skipped_api_ids == ("cuLaunchKernel",)
    assert len(source.api_names()) == 2
    source.stop()


def test_callbacks_hand_over_buffers_nodes_and_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called through their C function pointers from another thread, as CUPTI does."""
    sink, library = Gathered(), FakeLibrary()
    callbacks = process_callbacks()
    source = connected(monkeypatch, library)
    source.start(sink)
    image = ctypes.create_string_buffer(b"cubin image", 11)
    graph = _GraphData(node=7, original_node=3)
    module = _ModuleData(cubin_size=11, cubin=ctypes.addressof(image))

    def resource(cbid: int, descriptor: ctypes.Structure) -> None:
        data = _ResourceData(descriptor=ctypes.addressof(descriptor))
        callbacks.resource(None, 3, cbid, ctypes.addressof(data))

    def cupti() -> None:
        buffer, size, most = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(9)
        callbacks.requested(ctypes.pointer(buffer), ctypes.pointer(size), ctypes.pointer(most))
        assert buffer.value is not None
        assert buffer.value % 8 == 0
        ctypes.memmove(buffer.value, b"records!", 8)
        callbacks.completed(None, 0, buffer.value, size.value, 8)
        resource(GRAPHNODE_CREATED, graph)
        resource(GRAPHNODE_CLONED, graph)
        resource(MODULE_LOADED, module)
        threads.append(threading.get_native_id())

    threads: list[int] = []
    thread = threading.Thread(target=cupti)
    thread.start()
    thread.join()
    assert [buffer.data.tobytes() for buffer in sink.buffers] == [b"records!"]
    assert sink.nodes == [GraphNode(70, 0, threads[0], 123), GraphNode(70, 30, threads[0], 123)]
    assert sink.modules == [LoadedModule(b"cubin image", 123)]
    sink.buffers[0].release()
    source.stop()
    resource(GRAPHNODE_CREATED, graph)
    assert len(sink.nodes) == 2


def test_buffers_are_reused_and_bounded() -> None:
    """A buffer that was given back is taken again; past the bound a request is declined."""
    pool = BufferPool(64, most=2)
    first, second = pool.take(), pool.take()
    assert 0 not in (first, second)
    assert pool.take() == 0
    pool.give_back(first)
    assert pool.take() == first


def test_unreadable_records_are_refused_before_anything_is_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library from the future is a reason, not a guess."""
    library = FakeLibrary()
    monkeypatch.setattr(library, "record_sizes", lambda: {**RECORD_SIZES, Kind.CONCURRENT_KERNEL: 999})
    source = connected(monkeypatch, library)
    with pytest.raises(SourceUnavailableError, match="999 bytes are unknown"):
        source.start(Gathered())
    assert called(library) == ["cuptiSubscribe", "cuptiUnsubscribe"]

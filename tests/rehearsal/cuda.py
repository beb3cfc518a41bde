"""Gives torch._C what a CUDA build has, from the extension, so that torch.cuda is imported as it is.

`load_registrations` comes before torch is imported, `define_names` before torch.cuda is: torch asks for CUDA's hooks
once, and torch.cuda takes what it finds in torch._C. Only names that CUDA builds have are defined (`test_names.py`).
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

from tests.rehearsal import build

CAPABILITY, VERSION = (9, 0), "13.0"
NCCL = 2 << 16 | 28
"""NCCL's major and minor version."""
KIND = 1
"""CUDA's number among the kinds of devices (c10/core/DeviceType.h)."""
GIB = 2**30
DEVICES, MEMORY, TAKEN = "REHEARSAL_DEVICES", "REHEARSAL_GIB", "REHEARSAL_TAKEN_GIB"
"""The environment variables with the number of devices, the GiB of each, and those that another process has taken."""

LAG = "REHEARSAL_LAG"
"""The environment variable with the seconds that another thread than the training one waits for the device at least."""


class _State:
    """What the stand-in for the driver knows of this process."""

    def __init__(self) -> None:
        self.initialised_by: int | None = None
        self.names: set[str] = set()
        self.device: Any = None


state = _State()


def count_devices() -> int:
    """Return how many devices this process is to see; 0 where it is not rehearsed."""
    return int(os.environ.get(DEVICES, "0"))


def load_registrations() -> None:
    """Load the extension's registrations."""
    for library in (build.find_torch_folder() / "lib" / "libtorch_python.so", build.build_extension()):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def load_extension() -> Any:
    """Return the extension as a module; torch._C must have been imported."""
    loader = importlib.machinery.ExtensionFileLoader(build.NAME, str(build.build_extension()))
    spec = importlib.util.spec_from_loader(build.NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def define_names(torch: Any) -> Any:
    """Define CUDA's names in torch._C, and return the extension.

    Args:
        torch: the module, whose _C is complete.
    """
    device: Any = load_extension()
    state.device = device
    configure_devices()
    groups = (
        _build_device_names(torch, device),
        _build_stream_names(torch, device),
        _build_memory_names(device),
        _build_graph_names(),
    )
    for group in groups:
        for name, value in group.items():
            setattr(torch._C, name, value)
            state.names.add(f"torch._C.{name}")
    torch._C._has_cuda = True
    return device


def configure_devices() -> None:
    """Set the number of devices and their memory as the environment says."""
    if state.device is not None:
        state.device.set_device_count(count_devices())
        state.device.set_memory(read_total_memory() - int(float(os.environ.get(TAKEN, "0")) * GIB))


def read_total_memory() -> int:
    """Return the bytes of each device."""
    return int(float(os.environ.get(MEMORY, "79.65")) * GIB)


def _build_device_names(torch: Any, device: Any) -> dict[str, Any]:
    def initialise() -> None:
        state.initialised_by = os.getpid()
        torch.cuda.default_generators = tuple(map(device.default_generator, range(count_devices())))
        torch.cuda._get_device_properties = lambda index: _make_properties()

    def set_device(index: int) -> None:
        device.exchange_device(index)

    def exchange_device(index: int) -> int:
        return int(device.exchange_device(index))

    def maybe_exchange_device(index: int) -> int:
        return int(device.exchange_device(index))

    return {
        "_cuda_init": initialise,
        "_cuda_isInBadFork": lambda: state.initialised_by not in (None, os.getpid()),
        "_cuda_getDeviceCount": device.device_count,
        "_cuda_getDevice": device.device,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange_device,  # torch.compile knows each function by one name only
        "_cuda_maybeExchangeDevice": maybe_exchange_device,
        "_cuda_hasPrimaryContext": lambda index: True,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_synchronize": lambda: _wait_for_device(device, device.synchronize),
        "_cuda_set_sync_debug_mode": device.set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": device.sync_debug_mode,
        "_CudaDeviceProperties": SimpleNamespace,
        "_nccl_version": lambda: NCCL << 16,
        "_nccl_version_suffix": lambda: b"",
        "_cudart": SimpleNamespace(cudaMemGetInfo=lambda index: _read_free_memory(device)),
    }


def _make_properties() -> SimpleNamespace:
    return SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=read_total_memory(),
        multi_processor_count=132, warp_size=32, max_threads_per_block=1024, max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472, L2_cache_size=50 * 2**20, gcnArchName="",
    )  # fmt: skip


def _read_free_memory(device: Any) -> tuple[int, int]:
    allocated, _, total = device.memory()
    return total - allocated, total


def in_training_thread() -> bool:
    """Return whether this is the thread that trains, or one of autograd's, for which Python has no object."""
    thread: Any = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]  # creates no object
    return thread is None or thread is threading.main_thread() or isinstance(thread, threading._DummyThread)


def _wait_for_device(device: Any, wait: Any) -> Any:
    """Wait for the device; what another thread waits for does not order what the training thread issues."""
    background = not in_training_thread()
    was_background = device.set_background(background)
    if background:  # a large state takes a while to copy
        time.sleep(float(os.environ.get(LAG, "0")))
    try:
        return wait()
    finally:
        device.set_background(was_background)


def follow_events(device: Any) -> None:
    """Let what a thread has waited for be known to the training thread when that sees a `threading.Event` set by it."""
    event: Any = threading.Event
    set_, is_set, wait = event.set, event.is_set, event.wait

    def observe_event(instance: Any, was_set: bool) -> bool:
        if was_set and hasattr(instance, "published") and in_training_thread():
            device.observe(instance.published)
        return was_set

    def publish_and_set(instance: Any) -> None:
        if not in_training_thread():
            instance.published = device.publish()
        set_(instance)

    event.set = publish_and_set
    event.is_set = lambda instance: observe_event(instance, is_set(instance))
    event.wait = lambda instance, timeout=None: observe_event(instance, wait(instance, timeout))


def _build_stream_names(torch: Any, device: Any) -> dict[str, Any]:
    def pack_stream(stream: int, index: int | None) -> tuple[int, int, int]:
        return stream, device.device() if index is None or index < 0 else index, KIND

    class _CudaStreamBase(torch._C.Stream):  # type: ignore[misc, name-defined]
        def __new__(cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0) -> Any:
            if device_type:
                return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
            return super().__new__(cls, device=torch.device("cuda", device.device()), priority=priority)

        cuda_stream = property(lambda self: self.stream_id)

        def synchronize(self) -> None:
            _wait_for_device(device, super().synchronize)

    class _CudaEventBase(torch._C.Event):  # type: ignore[misc, name-defined]
        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
        ) -> Any:
            event = super().__new__(
                cls, device=torch.device("cuda", device.device()), enable_timing=enable_timing, blocking=blocking
            )
            event.is_timed, event.moment = enable_timing, 0.0
            return event

        def record(self, stream: Any) -> None:
            super().record(stream)
            self.moment = time.perf_counter()  # torch's own method takes no object of a class derived from its event

        def synchronize(self) -> None:
            _wait_for_device(device, super().synchronize)

        def elapsed_time(self, other: Any) -> float:
            if not (self.is_timed and other.is_timed):
                raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
            return 1000 * float(other.moment - self.moment)

    return {
        "_CudaStreamBase": _CudaStreamBase,
        "_CudaEventBase": _CudaEventBase,
        "_cuda_getCurrentStream": lambda index: pack_stream(device.stream(index), index),
        "_cuda_getDefaultStream": lambda index: pack_stream(0, index),
        "_cuda_getCurrentRawStream": device.stream,
        "_cuda_setStream": lambda stream_id, device_index, device_type: device.set_stream(stream_id, device_index),
    }


def _build_memory_names(device: Any) -> dict[str, Any]:
    def reset_peak(index: int) -> None:
        device.reset_peak()

    def do_nothing(*arguments: Any, **named: Any) -> None:
        """Do what changes nothing here: no cache is kept, and no history."""

    return {
        "_cuda_emptyCache": do_nothing,
        "_cuda_memoryStats": lambda index: _collect_statistics(device),
        "_cuda_resetPeakMemoryStats": reset_peak,
        "_cuda_resetAccumulatedMemoryStats": reset_peak,
        "_cuda_memorySnapshot": lambda *arguments: _build_snapshot(device),
        "_cuda_record_memory_history": do_nothing,
        "_cuda_record_memory_history_legacy": do_nothing,
        "_cuda_attach_out_of_memory_observer": device.on_out_of_memory,
        "_cuda_getAllocatorBackend": lambda: "native",
    }


def _collect_statistics(device: Any) -> dict[str, Any]:
    current, peak, _ = device.memory()
    bytes_of = {"current": current, "peak": peak, "allocated": peak, "freed": peak - current}
    pools = dict.fromkeys(("all", "small_pool", "large_pool"), bytes_of)
    kinds = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
    return dict.fromkeys(kinds, pools) | {"num_alloc_retries": 0, "num_ooms": 0}


def _build_snapshot(device: Any) -> dict[str, Any]:
    """Return the allocator's snapshot: a segment for each tensor."""
    segments = []
    for address, size, stream, index in device.blocks():
        block = {"address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": []}
        segment = {"device": index, "address": address, "total_size": size, "stream": stream, "blocks": [block]}
        segments.append(segment | {"segment_type": "large", "allocated_size": size, "active_size": size})
    return {"segments": segments, "device_traces": [[]], "allocator_settings": {}}


def _build_graph_names() -> dict[str, Any]:
    """Return what torch.cuda imports by name where streams exist; only its answer that nothing is captured is used."""
    unused = {name: type(name, (), {}) for name in ("_CUDAGraph", "_graph_pool_handle")}
    return unused | {"_cuda_isCurrentStreamCapturing": lambda: False}


def finish_import(torch: Any) -> None:
    """Do what needs the whole of torch: name CUDA's version, and resize storages, which a CPU build does in C++."""
    torch.version.cuda = VERSION
    resize = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda" or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
            return resize(storage, size)
        state.device.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), int(size))
        return storage

    torch.UntypedStorage.resize_ = resize_
    follow_events(state.device)

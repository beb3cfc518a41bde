"""What the rehearsal's device does, by itself: `python -m tests.rehearsal.checks` prints each check's error, as JSON.

Run in a separate process, because torch must be imported with the device; `test_device.py` does.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("REHEARSAL_DEVICES", "2")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.rehearsal import cuda, imports

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Add a check."""
    CHECKS[function.__name__] = function
    return function


@contextmanager
def expect_error(text: str) -> Any:
    """Expect an error whose message holds a text."""
    try:
        yield
    except Exception as error:
        assert text in str(error), error
        return
    raise AssertionError(f"no error with {text!r}")


def list_new_races(issue: Callable[[], object]) -> list[str]:
    """Return the races that something adds."""
    initial_count = len(cuda.state.device.report()[2])
    issue()
    return list(cuda.state.device.report()[2][initial_count:])


def run_beside(work: Callable[[], object]) -> Any:
    """Let a further stream, which waits for the current one, do something, and return it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    return side


def count_waits(issue: Callable[[], object]) -> int:
    """Return how often the host waits in something."""
    count = lambda: sum(cuda.state.device.report()[1].values())
    initial_count = count()
    issue()
    return count() - initial_count


@check
def torch_sees_the_devices() -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2
    assert torch.cuda.get_device_capability() == cuda.CAPABILITY
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    with torch.cuda.device(1):
        assert torch.empty(1, device="cuda").device.index == torch.cuda.current_device() == 1


@check
def new_memory_has_no_value() -> None:
    assert torch.empty(3, device="cuda").isnan().all()


@check
def operations_have_the_values_of_a_cpu() -> None:
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    assert torch.equal((a.cuda() @ b.cuda()).cpu(), a @ b)
    assert torch.equal(torch.arange(12, device="cuda").view(3, 4)[1:, ::2].t().contiguous().cpu(),
                       torch.arange(12).view(3, 4)[1:, ::2].t())  # fmt: skip
    out = torch.empty(0, device="cuda")
    torch.add(a.cuda(), 1, out=out)
    assert torch.equal(out.cpu(), a + 1)


@check
def training_has_the_values_of_a_cpu() -> None:
    host_model, device_model = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, device="cuda")
    device_model.load_state_dict(host_model.state_dict())
    x = torch.randn(4, 8)
    for model, inputs in ((host_model, x), (device_model, x.cuda())):
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(inputs).square().mean().backward()
        optimizer.step()
    assert torch.equal(host_model.weight, device_model.weight.cpu())


@check
def generators_have_the_numbers_of_a_cpu() -> None:
    draw = lambda device: torch.empty(4, device=device).normal_(generator=torch.Generator(device).manual_seed(3))
    assert torch.equal(draw("cuda").cpu(), draw("cpu"))
    with expect_error("Expected a 'cuda' device type for generator"):
        torch.empty(2, device="cuda").normal_(generator=torch.Generator("cpu"))
    torch.cuda.manual_seed(1)
    first = torch.randn(3, device="cuda")
    torch.cuda.manual_seed(1)
    assert torch.equal(first.cpu(), torch.randn(3, device="cuda").cpu())


@check
def operands_on_two_devices_are_an_error() -> None:
    on_gpu = torch.ones(3, device="cuda")
    for operand in (torch.ones(3), torch.ones(3, device="cuda:1")):
        with expect_error("Expected all tensors to be on the same device"):
            on_gpu + operand
    assert (on_gpu * torch.tensor(2.0)).sum().item() == 6  # scalars of the host are allowed


@check
def waits_of_the_host_are_counted_and_can_be_errors() -> None:
    x = torch.ones(3, device="cuda")
    for wait in (lambda: x.sum().item(), lambda: x.cpu(), lambda: x.nonzero(), lambda: x[x > 0], lambda: x.tolist()):
        assert count_waits(wait) >= 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            with expect_error("called a synchronizing CUDA operation"):
                wait()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert count_waits(lambda: (x + 1).mean()) == 0


@check
def copies_of_pinned_memory_do_not_wait_and_those_of_pageable_memory_do() -> None:
    host, x = torch.ones(3), torch.ones(3, device="cuda")
    assert count_waits(lambda: host.pin_memory().to("cuda", non_blocking=True)) == 0
    assert count_waits(lambda: host.to("cuda", non_blocking=True)) == 1
    assert count_waits(lambda: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True)) == 0
    assert count_waits(lambda: torch.empty(3).copy_(x, non_blocking=True)) == 1


@check
def a_copy_to_pinned_memory_arrives_when_the_host_waits_for_it() -> None:
    host = torch.empty(3, pin_memory=True).copy_(torch.ones(3, device="cuda"), non_blocking=True)
    assert host.isnan().all()
    event = torch.cuda.Event()
    event.record()
    assert host.isnan().all()
    event.synchronize()
    assert host.tolist() == [1, 1, 1]


@check
def a_wait_for_an_earlier_event_does_not_finish_a_copy() -> None:
    event = torch.cuda.Event()
    event.record()
    host = torch.empty(3, pin_memory=True).copy_(torch.ones(3, device="cuda"), non_blocking=True)
    event.synchronize()
    assert host.isnan().all()
    torch.cuda.synchronize()
    assert host.tolist() == [1, 1, 1]


@check
def pinned_memory_that_changes_before_it_is_copied_is_reported() -> None:
    def change(early: bool) -> None:
        host = torch.ones(3).pin_memory()
        host.to("cuda", non_blocking=True)
        if early:
            host.zero_()
        torch.cuda.synchronize()
        host.zero_()

    assert "pinned memory" in list_new_races(lambda: change(True))[0]
    assert list_new_races(lambda: change(False)) == []


@check
def streams_that_do_not_wait_are_reported() -> None:
    def use(wait: bool) -> None:
        x = torch.ones(3, device="cuda")
        side = run_beside(lambda: x.mul_(2))
        if wait:
            torch.cuda.current_stream().wait_stream(side)
        x + 1

    (race,) = set(list_new_races(lambda: use(False)))
    assert race.startswith("read after write: aten::add")
    assert list_new_races(lambda: use(True)) == []


@check
def an_event_on_the_wrong_stream_orders_nothing() -> None:
    def use(stream_of_event: str) -> None:
        x = torch.ones(3, device="cuda")
        side = run_beside(lambda: x.mul_(2))
        event = (side if stream_of_event == "side" else torch.cuda.current_stream()).record_event()
        torch.cuda.current_stream().wait_event(event)
        x + 1

    assert list_new_races(lambda: use("side")) == []
    assert list_new_races(lambda: use("current"))


@check
def parts_of_a_tensor_are_followed_by_their_bytes() -> None:
    def use(part: slice) -> None:
        x = torch.ones(8, device="cuda")
        run_beside(lambda: x[4:].mul_(2))
        x[part].add_(1)

    assert list_new_races(lambda: use(slice(0, 4))) == []
    assert list_new_races(lambda: use(slice(3, 5)))


@check
def memory_that_is_freed_while_another_stream_uses_it_is_reported() -> None:
    def use(record: bool) -> None:
        x = torch.ones(1234, device="cuda")
        side = run_beside(lambda x=x: x * 2)
        if record:
            x.record_stream(side)
        del x
        torch.ones(1234, device="cuda")

    assert "had this memory before" in list_new_races(lambda: use(False))[0]
    assert list_new_races(lambda: use(True)) == []


def run_in_thread(work: Callable[[], object]) -> None:
    """Let another thread do something, and wait for it."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@check
def a_wait_of_a_background_thread_does_not_order_the_training_threads_work() -> None:
    def use(background: bool) -> None:
        x = torch.ones(3, device="cuda")
        event = run_beside(lambda: x * 2).record_event()
        if background:
            run_in_thread(event.synchronize)
        else:
            event.synchronize()
        x.mul_(2)

    assert list_new_races(lambda: use(True)) and list_new_races(lambda: use(False)) == []


@check
def a_threads_event_orders_what_comes_after_it_is_seen() -> None:
    def use(look: bool) -> None:
        x, finished = torch.ones(3, device="cuda"), threading.Event()
        event = run_beside(lambda: x * 2).record_event()
        run_in_thread(lambda: (event.synchronize(), finished.set()))
        if look:
            assert finished.is_set()
        x.mul_(2)

    assert list_new_races(lambda: use(False)) and list_new_races(lambda: use(True)) == []


@check
def events_measure_time_where_they_are_made_to() -> None:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    last.record()
    torch.cuda.synchronize()
    assert first.elapsed_time(last) >= 0
    with expect_error("enable_timing=True"):
        torch.cuda.Event().elapsed_time(last)


@check
def memory_is_counted_and_limited() -> None:
    torch.cuda.reset_peak_memory_stats()
    initial_bytes = torch.cuda.memory_allocated()
    x = torch.ones(1024, device="cuda")
    assert torch.cuda.memory_allocated() - initial_bytes == 4096
    snapshot = torch.cuda.memory._snapshot()["segments"]
    assert x.data_ptr() in {segment["address"] for segment in snapshot}
    del x
    assert torch.cuda.memory_allocated() == initial_bytes and torch.cuda.max_memory_allocated() >= initial_bytes + 4096
    calls = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *arguments: calls.append(arguments))
    try:
        torch.empty(2**40, device="cuda")
    except torch.OutOfMemoryError as error:
        assert "CUDA out of memory" in str(error)
    assert [arguments[:2] for arguments in calls] == [(0, 4 * 2**40)]


@check
def storages_are_resized() -> None:
    x = torch.arange(4.0, device="cuda")
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().size() == 0
    x.untyped_storage().resize_(16)
    assert x.isnan().all()


@check
def flash_attention_has_the_gpus_limits_and_the_values_of_math() -> None:
    q, k, v = (torch.randn(1, 2, 16, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    operations = cuda.state.device.report()[0]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out.sum().backward()
    later_operations = cuda.state.device.report()[0]
    for name in ("flash attention", "flash attention backward"):
        assert later_operations.get(name, 0) == operations.get(name, 0) + 1
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (out - expected).abs().max().item() < 0.02
    assert F.scaled_dot_product_attention(*(t.float() for t in (q, k, v))).shape == q.shape
    with expect_error("multiple of 8"):
        torch.ops.aten._scaled_dot_product_flash_attention(*(torch.ones(1, 1, 2, 4, device="cuda").bfloat16(),) * 3)


@check
def a_forked_process_can_not_use_a_device_that_is_in_use() -> None:
    torch.cuda.init()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b"1" if torch.cuda._is_in_bad_fork() else b"0")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 1) == b"1"


def main() -> int:
    """Run the checks, in a process that has the device."""
    errors = {}
    for name, function in CHECKS.items():
        try:
            function()
            errors[name] = ""
        except Exception:
            errors[name] = traceback.format_exc()
    print(json.dumps(errors))
    return 0


if __name__ == "__main__":
    imports.install_finder()
    import threading

    import torch
    import torch.nn.functional as F

    sys.exit(main())

"""The vector that ranks sum in each step, and the times of the latest steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from titan.dataset.loader import Batch
from titan.metrics.schema import WARM
from titan.training.step_metrics import (
    LOSS,
    PAIRS,
    REQUEUE,
    SAVE,
    STOP,
    VALID,
    VOID,
    StepTimes,
    format_batch_hash,
    pack_metrics,
)


def batch(number: int, void: bool = False) -> Batch:
    return Batch(np.zeros((2, 1, 1, 4), np.int32), 0, 0, 1, number, valid=3, pairs=16, void=void)


def test_the_sum_over_ranks_has_every_request_and_the_batch_hash() -> None:
    numbers = [2**64 - 1, 5, 2**63 + 12345]
    requests = [(True, False, False), (False, False, True), (True, True, False)]
    parts = [
        pack_metrics(torch.tensor(0.5), batch(n), stop=stop, requeue=requeue, save=save)
        for n, (stop, requeue, save) in zip(numbers, requests, strict=True)
    ]
    total = torch.stack(parts).sum(0).tolist()
    assert [total[i] for i in (LOSS, STOP, REQUEUE, SAVE, VOID, VALID, PAIRS)] == [1.5, 2, 1, 1, 0, 9, 48]
    assert format_batch_hash(total) == f"{sum(numbers) % 2**64:016x}"


def test_a_void_batch_asks_to_stop() -> None:
    values = pack_metrics(torch.tensor(0.0), batch(0, void=True), stop=False, requeue=False, save=False).tolist()
    assert (values[STOP], values[VOID]) == (1, 1)


def test_the_median_leaves_out_the_first_steps() -> None:
    times = StepTimes()
    assert (times.find_median(), times.compute_data_wait()) == (None, None)
    for _ in range(WARM):
        times.add(100.0, 1.0, 0.0)
    assert times.find_median() == (100.0, 1.0)
    for seconds in (1.0, 3.0, 2.0):
        times.add(seconds, 10 * seconds, 0.0)
    assert times.find_median() == (2.0, 20.0)


def test_the_share_of_waiting_is_over_the_same_steps() -> None:
    """Waiting of all steps over the time of the latest ones would grow above one."""
    times = StepTimes(latest=4)
    for waited in (*[2.0] * 40, *[0.5] * 4):
        times.add(2.0, 1.0, waited)
    assert times.compute_data_wait() == pytest.approx(0.25)

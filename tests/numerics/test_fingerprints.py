"""Fingerprints: every bit and every place counts, whatever the type and the strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from titan.numerics import fingerprints
from titan.numerics.fingerprints import COLUMNS, fingerprint

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64, torch.int64, torch.int8]


def count_bits(tensor: Tensor) -> int:
    return 8 * tensor.nbytes


def flip(tensor: Tensor, bit: int) -> Tensor:
    """Return a copy with one bit flipped."""
    out = tensor.clone()
    out.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return out


@pytest.mark.parametrize("dtype", TYPES, ids=[str(t).removeprefix("torch.") for t in TYPES])
def test_each_flipped_bit_changes_it(dtype: torch.dtype) -> None:
    tensor = (torch.randn(7, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    prints = {int(fingerprint(flip(tensor, bit))) for bit in range(count_bits(tensor))}
    assert len(prints) == count_bits(tensor), "two flips look alike"
    assert int(fingerprint(tensor)) not in prints
    assert int(fingerprint(tensor.clone())) == int(fingerprint(tensor))


@pytest.mark.parametrize("bit", [0, 30, 31])
@pytest.mark.parametrize("index", [0, COLUMNS - 1, COLUMNS, 16 * COLUMNS + 5, 17 * COLUMNS + 2])
def test_flips_in_all_parts_of_a_large_tensor(index: int, bit: int) -> None:
    tensor = torch.zeros(17 * COLUMNS + 3)
    changed = tensor.clone()
    changed.view(torch.int32)[index] ^= -(2**31) if bit == 31 else 1 << bit
    assert int(fingerprint(changed)) not in (0, int(fingerprint(tensor[:-1]).add(1)))
    assert int(fingerprint(tensor)) == 0


def test_exchanged_elements_change_it() -> None:
    tensor = torch.arange(2 * COLUMNS + 9, dtype=torch.float32)
    original = int(fingerprint(tensor))
    for i, j in ((0, 1), (3, COLUMNS + 3), (COLUMNS - 1, COLUMNS), (5, 2 * COLUMNS + 8)):
        exchanged = tensor.clone()
        exchanged[[i, j]] = tensor[[j, i]]
        assert int(fingerprint(exchanged)) != original


def test_it_is_the_sum_of_words_times_their_factors() -> None:
    words = torch.randint(-(2**31), 2**31, (2 * COLUMNS + 7,), generator=torch.Generator().manual_seed(1)).int()
    columns, rows = (part.tolist() for part in fingerprints._get_factors(torch.device("cpu")))
    expected = sum(word * columns[i % COLUMNS] * rows[i // COLUMNS] for i, word in enumerate(words.tolist()))
    assert int(fingerprint(words)) % 2**64 == expected % 2**64


def test_a_larger_tensor_has_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.arange(5 * COLUMNS + 3, dtype=torch.int32)
    whole = int(fingerprint(words))
    monkeypatch.setattr(fingerprints, "MAX_ROWS", 2)
    pieces = [int(fingerprint(part)) for part in words.split(2 * COLUMNS)]
    columns, _ = fingerprints._get_factors(torch.device("cpu"))
    expected = sum(piece * factor for piece, factor in zip(pieces, columns[:3].tolist(), strict=True))
    assert int(fingerprint(words)) % 2**64 == expected % 2**64 != whole % 2**64


def test_factors_keep_flips_and_exchanges_apart() -> None:
    """Odd ones let no flip vanish; ones that differ modulo 2^33 let no exchange of two words do."""
    columns, rows = fingerprints._get_factors(torch.device("cpu"))
    assert bool((columns & 1).all()) and bool((rows & 1).all())
    assert len((columns & (2**17 - 1)).unique()) == COLUMNS
    assert bool((rows & (2**17 - 1) == 1).all()) and len((rows & (2**33 - 1)).unique()) == len(rows)


def test_strides_and_offsets_do_not_matter() -> None:
    base = torch.randn(9, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    for view in (base.t(), base[1:, 1:], base[:, 3], base.flatten()[1:], base[:0], base[4, 4]):
        assert int(fingerprint(view)) == int(fingerprint(view.clone(memory_format=torch.contiguous_format)))


def test_what_is_not_a_number_counts_by_its_bits() -> None:
    quiet = torch.tensor([float("nan"), 1.0])
    assert int(fingerprint(quiet)) == int(fingerprint(quiet.clone()))
    assert int(fingerprint(flip(quiet, 3))) != int(fingerprint(quiet))
    assert int(fingerprint(torch.tensor([0.0]))) != int(fingerprint(torch.tensor([-0.0])))

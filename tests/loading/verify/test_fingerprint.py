from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core import ExpertStore, fingerprints
from eplb_core.loading.verify.keys import CHUNK_BYTES, KEYS, LANES, LINES, chunk_range
from tests.loading.worlds import interpreted, needs_cuda, needs_triton

WRAP = 2**64


def print_by_definition(data: bytes, step: int = 1, offset: int = 0) -> int:
    """The formula at the top of the module, in Python's integers."""
    data += b"\0" * (-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    chunks = -(-len(words) // (LANES * LINES))
    total = 0
    for chunk in range(offset % min(step, chunks), chunks, step):
        lanes = [0] * LANES
        for at, word in enumerate(words[chunk * LANES * LINES : (chunk + 1) * LANES * LINES]):
            lanes[at % LANES] += int(KEYS[at // LANES]) * word
        for lane, value in enumerate(lanes):
            z = value * (2 * (chunk * LANES + lane) + 1) * 0x9E3779B97F4A7C15 % WRAP
            z = (z ^ (z >> 33)) * 0xFF51AFD7ED558CCD % WRAP
            z = (z ^ (z >> 33)) * 0xC4CEB9FE1A85EC53 % WRAP
            total += z ^ (z >> 33)
    total %= WRAP
    return total - WRAP if total >= WRAP // 2 else total


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def prints_of(rows: torch.Tensor, device: torch.device | str = "cpu") -> list[int]:
    result = fingerprints([ExpertStore({"w": rows.to(device)})])
    assert result.shape == (1, len(rows), 1)
    assert result.dtype == torch.int64
    return result[0, :, 0].tolist()


SIZES = [1, 3, 4, 16, 8191, 8192, 8212, 3 * 8192 + 5]


@pytest.mark.parametrize("nbytes", SIZES)
def test_prints_are_those_of_the_definition(nbytes: int, device: torch.device) -> None:
    rows = random_bytes(2, nbytes)
    assert prints_of(rows, device) == [print_by_definition(bytes(row.tolist())) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [CHUNK_BYTES - 4, CHUNK_BYTES, 2 * CHUNK_BYTES + 16, 3 * CHUNK_BYTES + 7])
@pytest.mark.parametrize("sample", [None, 2, (2, 1), (7, 6)])
def test_prints_of_several_chunks_and_samples_are_those_of_the_definition(
    nbytes: int, sample: int | tuple[int, int] | None, device: torch.device
) -> None:
    if os.environ.get("NUMBA_DISABLE_JIT") == "1":
        pytest.skip("a minute without the compiler; smaller rows cover the code")
    rows = random_bytes(1, nbytes)
    step, offset = (1, 0) if sample is None else (sample, 0) if isinstance(sample, int) else sample
    expected = print_by_definition(bytes(rows[0].tolist()), step, offset)
    assert fingerprints([ExpertStore({"w": rows.to(device)})], sample=sample).item() == expected


@settings(max_examples=40)
@given(data=st.binary(min_size=1, max_size=200), other=st.binary(min_size=1, max_size=200))
def test_equal_bytes_and_no_others_have_equal_prints(data: bytes, other: bytes) -> None:
    other = (other * len(data))[: len(data)]
    rows = torch.tensor([list(data), list(other), list(data)], dtype=torch.uint8)
    first, second, third = prints_of(rows)
    assert first == third
    assert (first == second) == (data == other)


def test_dtype_stride_and_place_do_not_matter(device: torch.device) -> None:
    """Only the bytes of a row count, wherever they lie and however they are described."""
    rows = random_bytes(3, 480)
    expected = prints_of(rows)
    apart = torch.zeros(3, 512, dtype=torch.uint8)
    apart[:, 3:483] = rows
    in_words = rows.view(torch.int32).reshape(3, 12, 10)
    for tensor in (
        rows.view(torch.bfloat16),
        rows.view(torch.float8_e4m3fn),
        rows.view(torch.float64),
        in_words,
        in_words.permute(0, 2, 1),
    ):
        assert prints_of(tensor, device) == expected
    assert fingerprints([ExpertStore({"w": apart.to(device)[:, 3:483]})])[0, :, 0].tolist() == expected
    assert fingerprints([ExpertStore({"w": [row.to(device) for row in rows]})])[0, :, 0].tolist() == expected


def test_every_flipped_bit_changes_the_print(device: torch.device) -> None:
    """A change within one word is never missed: all 1,304 single-bit changes of a row of 163 bytes."""
    row = random_bytes(163)
    flipped = row.repeat(163 * 8, 1)
    for bit in range(163 * 8):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    prints = prints_of(torch.cat([row[None], flipped]), device)
    assert len(set(prints)) == 1 + 163 * 8


def test_exchanged_bytes_words_and_lines_change_the_print(device: torch.device) -> None:
    row = random_bytes(4 * 8192)
    variants = [row]
    for width in (1, 2, 4, 16, 8192):
        swapped = row.clone()
        swapped[:width], swapped[width : 2 * width] = row[width : 2 * width], row[:width]
        variants.append(swapped)
    halves = torch.cat([row[2 * 8192 :], row[: 2 * 8192]])
    one_line = row[:64].view(torch.int32)
    assert len(set(prints_of(torch.stack([one_line, one_line.flip(0), one_line.roll(1)]), device))) == 3
    assert len(set(prints_of(torch.stack([*variants, halves, row.roll(1), row.flip(0)]), device))) == 9


def test_sign_flips_do_not_cancel(device: torch.device) -> None:
    """Top bits are what multiplication is blind to: every pair of flipped signs in 64 words gives another print."""
    row = random_bytes(64 * 4)
    rows = [row]
    for first in range(64):
        for second in range(first):
            other = row.clone()
            other[4 * first + 3] ^= 128
            other[4 * second + 3] ^= 128
            rows.append(other)
    assert len(set(prints_of(torch.stack(rows), device))) == 1 + 64 * 63 // 2


def test_keys_are_what_the_argument_needs() -> None:
    """No difference of one word times a key is a multiple of 2**64, and no two keys cancel a pair of top bits."""
    low = [int(key) % 2**33 for key in KEYS]
    assert len(KEYS) == LINES
    assert 0 not in low
    assert len({*low, *(2**33 - value for value in low)}) == 2 * LINES


def test_the_print_of_zeros_is_zero(device: torch.device) -> None:
    assert prints_of(torch.zeros(2, 8200), device) == [0, 0]


def test_layers_and_tensors_are_where_they_were_asked_for(device: torch.device) -> None:
    tensors = [
        {"w13": random_bytes(3, 40 + layer).to(device), "scale": random_bytes(3, 4).to(device)} for layer in range(4)
    ]
    stores = [ExpertStore(by_name) for by_name in tensors]
    full = fingerprints(stores)
    assert full.shape == (4, 3, 2)
    for layer in range(4):
        for column, name in enumerate(("w13", "scale")):
            assert full[layer, :, column].tolist() == prints_of(tensors[layer][name].cpu())
    assert torch.equal(fingerprints(stores, layers=[2, 0]), full[[2, 0]])
    assert torch.equal(fingerprints(stores, layers=[False, True, False, True]), full[[1, 3]])
    assert fingerprints(stores, layers=[]).shape == (0, 3, 2)


def test_whole_tensors_have_prints_of_their_own(device: torch.device) -> None:
    scale = random_bytes(6, 4).to(device)
    stores = [ExpertStore({"w": random_bytes(3, 8).to(device)}, whole={"scale": scale})]
    assert fingerprints(stores, whole=True)[0, :, 0].tolist() == prints_of(scale.cpu())
    assert fingerprints([ExpertStore({"w": random_bytes(3, 8)})], whole=True).shape == (1, 0, 0)


def test_samples_read_each_chunk_once_in_turn() -> None:
    """Small rows are read whole in every sample: nothing is left out for ever."""
    for chunks in (1, 2, 3, 7, 8, 9):
        reads = [list(chunk_range(chunks * CHUNK_BYTES, 4, offset)) for offset in range(4)]
        assert all(reads)
        assert sorted({chunk for read in reads for chunk in read}) == list(range(chunks))
    assert list(chunk_range(5 * CHUNK_BYTES, 1, 3)) == [0, 1, 2, 3, 4]


def test_bad_arguments_say_what_is_wrong() -> None:
    store = ExpertStore({"w": random_bytes(3, 8)})
    with pytest.raises(ValueError, match="`stores` must hold one store per layer"):
        fingerprints([])
    with pytest.raises(ValueError, match="layer 1 lacks 'w'"):
        fingerprints([store, ExpertStore({"v": random_bytes(3, 8)})])
    with pytest.raises(IndexError, match=r"`layers` \(=1\) must be in \[0, 1\)"):
        fingerprints([store], layers=[1])
    with pytest.raises(ValueError, match=r"`sample` \(=0\) must be at least 1"):
        fingerprints([store], sample=0)
    with pytest.raises(ValueError, match=r"`sample offset` \(=-1\) must be at least 0"):
        fingerprints([store], sample=(2, -1))


@pytest.mark.slow
@needs_triton
def test_the_gpu_kernel_gives_the_same_prints_in_triton_s_interpreter() -> None:
    assert interpreted("tests.loading.verify.interpreted_fingerprints") == "equal\n"


@pytest.mark.cuda
@needs_cuda
def test_the_host_does_not_wait_and_nothing_compiles_for_other_sizes() -> None:
    from eplb_core.loading.verify import fingerprint_gpu

    def stores(slots: int, nbytes: int) -> list[ExpertStore]:
        return [ExpertStore({"w": random_bytes(slots, nbytes).cuda(), "s": random_bytes(slots, 7).cuda()})]

    fingerprints(stores(3, 1 << 20))
    torch.cuda.synchronize()
    others = [stores(1, 1 << 18), stores(5, 1 << 21), stores(4, 16)]
    compiled = sum(len(cache[0]) for cache in fingerprint_gpu._print_chunks.device_caches.values())
    torch.cuda.set_sync_debug_mode("error")
    try:
        for other in others:
            fingerprints(other)
            fingerprints(other, sample=2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(len(cache[0]) for cache in fingerprint_gpu._print_chunks.device_caches.values()) == compiled


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("nbytes", [5 * CHUNK_BYTES, 5 * CHUNK_BYTES + 12, 5 * CHUNK_BYTES + 3])
def test_gpu_and_cpu_agree_on_rows_of_many_chunks(nbytes: int) -> None:
    rows = random_bytes(7, nbytes)
    for sample in (None, 2, (3, 2), (9, 8)):
        on_cpu = fingerprints([ExpertStore({"w": rows})], sample=sample)
        assert torch.equal(fingerprints([ExpertStore({"w": rows.cuda()})], sample=sample).cpu(), on_cpu)


@pytest.mark.cuda
@needs_cuda
def test_prints_on_one_stream_do_not_depend_on_what_another_has_still_to_do() -> None:
    """The first call of a process, behind other work on its stream, and a worker's beside it."""
    from eplb_core.loading.verify import fingerprint_gpu

    stores = [ExpertStore({"w": random_bytes(4, 1 << 20).cuda()})]
    right = fingerprints(stores).cpu()
    fingerprint_gpu._keys.cache_clear()
    busy: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(busy):
        torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # cycles: half a second
        fingerprints(stores)
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        assert torch.equal(fingerprints(stores).cpu(), right)

from __future__ import annotations

import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from deepinfer.core.errors import ConfigError
from deepinfer.sampling import rng
from deepinfer.sampling.rng import Stream

FULL = 0xFFFFFFFF

# Known answers published with Random123 for philox4x32, 10 rounds: (counter, key, words).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert rng.philox4x32(counter, key) == words
    tensors = rng.philox4x32(
        [torch.tensor([w, 1, w]) for w in counter], [torch.tensor([w, 2, w]) for w in key]
    )
    assert tuple(int(t[0]) for t in tensors) == words
    assert tuple(int(t[2]) for t in tensors) == words


def test_tensors_equal_integers_for_random_inputs():
    source = random.Random(5)
    rows = [[source.getrandbits(32) for _ in range(6)] for _ in range(200)]
    columns = torch.tensor(rows).T
    got = torch.stack(rng.philox4x32(list(columns[:4]), list(columns[4:])), dim=1).tolist()
    want = [list(rng.philox4x32(row[:4], row[4:])) for row in rows]
    assert got == want


def test_words_of_tokens_follow_the_documented_counter():
    seed = 0x0123456789ABCDEF
    bits = rng.noise_bits([seed], [77], vocab_size=1003, stream=Stream.ACCEPT)
    for token in (0, 1, 2, 3, 4, 500, 1002):
        words = rng.philox4x32((77, token >> 2, int(Stream.ACCEPT), 0), (0x89ABCDEF, 0x01234567))
        assert int(bits[0, token]) == words[token & 3]


@pytest.mark.parametrize("vocab", [1, 3, 4, 5, 1000])
def test_subset_equals_whole_vocabulary(vocab):
    seeds, positions = [1, 2**64 - 1, 0], [0, 5, 2**31]
    whole = rng.noise_bits(seeds, positions, vocab_size=vocab)
    assert whole.shape == (3, vocab)
    ids = torch.randint(0, vocab, (3, 50), generator=torch.Generator().manual_seed(0))
    some = rng.noise_bits(seeds, positions, token_ids=ids)
    assert torch.equal(some, whole.gather(-1, ids))
    assert torch.equal(
        rng.gumbel_from_bits(some), rng.gumbel_noise(seeds, positions, token_ids=ids)
    )


def test_seed_tensor_equals_seed_integers():
    seeds = [0, 5, 2**63, 2**64 - 1]
    as_int64 = torch.tensor([s - 2**64 if s >= 2**63 else s for s in seeds])
    a = rng.noise_bits(seeds, [3] * 4, vocab_size=9)
    b = rng.noise_bits(as_int64, torch.tensor([3] * 4), vocab_size=9)
    assert torch.equal(a, b)


def test_a_row_does_not_depend_on_its_batch():
    whole = rng.gumbel_noise(list(range(7)), list(range(7)), vocab_size=4001)
    for row in range(7):
        alone = rng.gumbel_noise([row], [row], vocab_size=4001)
        assert torch.equal(alone[0], whole[row])


def test_every_field_of_the_counter_matters():
    base = rng.noise_bits([1], [1], vocab_size=64)
    assert not (base == rng.noise_bits([2], [1], vocab_size=64)).any()
    assert not (base == rng.noise_bits([1 + 2**32], [1], vocab_size=64)).any()
    assert not (base == rng.noise_bits([1], [2], vocab_size=64)).any()
    seen = set()
    for stream in Stream:
        seen |= set(rng.noise_bits([1], [1], vocab_size=64, stream=stream)[0].tolist())
    assert len(seen) == 64 * len(Stream)
    assert len({int(stream) for stream in Stream}) == len(list(Stream))


def test_gumbel_noise_is_finite_at_both_ends():
    noise = rng.gumbel_from_bits(torch.tensor([0, 1, 2**31, FULL - 1, FULL]))
    assert noise.isfinite().all()
    assert (noise.diff() > 0).all()
    assert noise[0] > rng.MIN_GUMBEL
    assert noise[-1] < rng.MAX_GUMBEL
    # in float32 the same ends must survive a cast
    assert noise.to(torch.float32).isfinite().all()


def test_uniform_numbers_are_uniform():
    u = rng.uniform_from_bits(rng.noise_bits([11], [0], vocab_size=1 << 16))[0].numpy()
    counts = np.histogram(u, bins=64, range=(0, 1))[0]
    chi2 = ((counts - 1024) ** 2 / 1024).sum()
    assert 25 < chi2 < 115  # 63 degrees of freedom; both tails below 1e-4
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
    assert u.min() > 0
    assert u.max() < 1


def test_gumbel_moments():
    noise = rng.gumbel_noise([3], [9], vocab_size=200_000)
    assert abs(float(noise.mean()) - 0.5772156649) < 0.015
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03


def test_elementwise_logarithm_does_not_depend_on_the_place_in_a_tensor():
    # The sampler makes noise for some tokens or for all; both must give one bit pattern.
    bits = rng.noise_bits([8], [8], vocab_size=5000)[0]
    whole = rng.gumbel_from_bits(bits)
    for offset in range(17):
        for length in (1, 2, 3, 5, 7, 8, 9, 31, 100):
            part = rng.gumbel_from_bits(bits[offset : offset + length].clone())
            assert torch.equal(part, whole[offset : offset + length])


def test_child_seeds():
    assert rng.child_seed(7, 0) == 7
    children = {rng.child_seed(7, i) for i in range(100)} | {
        rng.child_seed(8, i) for i in range(100)
    }
    assert len(children) == 200
    assert all(0 <= seed < 2**64 for seed in children)
    assert rng.child_seed(2**64 - 1, 3) == rng.child_seed(2**64 - 1, 3)


def test_unseeded_requests_differ_and_seeded_ones_do_not():
    assert len({rng.resolve_seed(None) for _ in range(20)}) == 20
    assert rng.resolve_seed(4) == 4
    assert rng.resolve_seed(4, 2) == rng.child_seed(4, 2)


def test_exactly_one_of_vocab_size_and_token_ids():
    with pytest.raises(ConfigError, match="neither"):
        rng.noise_bits([1], [1])
    with pytest.raises(ConfigError, match="both"):
        rng.noise_bits([1], [1], vocab_size=3, token_ids=torch.zeros(1, 1, dtype=torch.int64))


def test_another_process_gives_the_same_noise():
    code = (
        "from deepinfer.sampling import gumbel_noise;"
        "print(gumbel_noise([5, 6], [1, 2], vocab_size=10).numpy().tobytes().hex())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert (
        result.stdout.strip()
        == rng.gumbel_noise([5, 6], [1, 2], vocab_size=10).numpy().tobytes().hex()
    )


@pytest.mark.gpu
def test_gpu_words_equal_cpu_words():
    cpu = rng.noise_bits([5, 6], [1, 2], vocab_size=1001)
    gpu = rng.noise_bits([5, 6], [1, 2], vocab_size=1001, device="cuda")
    assert torch.equal(cpu, gpu.cpu())
    noise = rng.gumbel_noise([5, 6], [1, 2], vocab_size=1001, device="cuda").cpu()
    assert (noise - rng.gumbel_from_bits(cpu)).abs().max() < 1e-12

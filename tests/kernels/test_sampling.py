"""Choosing tokens: noise equal to the sampler's, filters equal to its, hard rows, laws; the kernels under the interpreter."""

from __future__ import annotations

import math
import os

import pytest
import torch

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import sampling
from deepinfer.kernels.reference.noise import noise_words, token_gumbel
from deepinfer.sampling import apply_penalties as penalise_row
from deepinfer.sampling import filter_logits, gumbel_noise, noise_bits, token_logprobs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["torch", "triton"] if INTERPRETED else ["torch"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]
SEEDS = torch.tensor([0, 1, -4, 2**40 + 5, 2**62, 3])
POSITIONS = torch.tensor([0, 5, 2**31, 9, 2**20, 7])


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hard_rows(vocab: int) -> torch.Tensor:
    x = randn(6, vocab) * 3
    x[1] = -math.inf
    x[2, vocab // 2] = math.nan
    x[3] = 1.5
    x[4, : vocab - 3] = -math.inf
    x[5, 7] = math.inf
    return x


def test_noise_is_that_of_the_sampler() -> None:
    ids = torch.arange(30).unsqueeze(0)
    for stream in (0, 3):
        words = noise_words(SEEDS, POSITIONS, ids, stream)
        assert torch.equal(words, noise_bits(SEEDS, POSITIONS, vocab_size=30, stream=stream))
        noise = token_gumbel(SEEDS, POSITIONS, ids, stream)
        assert torch.equal(noise, gumbel_noise(SEEDS, POSITIONS, vocab_size=30, stream=stream))
    some = torch.tensor([[7, 3], [0, 1], [2, 2], [9, 130_000], [4, 5], [6, 8]])
    words = noise_words(SEEDS, POSITIONS, some, 1)
    assert torch.equal(words, noise_bits(SEEDS, POSITIONS, token_ids=some, stream=1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab", [5, 300, 1000])
def test_the_highest_logit(backend, vocab) -> None:
    x = hard_rows(vocab) if vocab > 7 else randn(6, vocab)
    found = sampling.argmax_sample(x, backend=backend)
    for row, token in zip(x, found.tolist(), strict=True):
        top = row.amax()
        wanted = int((row == top).nonzero()[0]) if top.isfinite() else -1
        assert token == wanted


@pytest.mark.parametrize("backend", BACKENDS)
def test_draws_are_the_samplers(backend) -> None:
    x = hard_rows(700)
    warm = torch.tensor([0.7, 1.0, 1.0, 2.0, 0.0, 1.0], dtype=torch.float64)
    found = sampling.gumbel_sample(
        x, SEEDS, POSITIONS, temperature=warm, stream=0, backend=backend
    ).tolist()
    noise = gumbel_noise(SEEDS, POSITIONS, vocab_size=700)
    assert found[1] == found[2] == found[5] == -1
    for row in (0, 3):
        score = (x[row].double() - x[row].amax().double()) / warm[row] + noise[row]
        assert found[row] == int(score.argmax())
    assert found[4] == int(x[4].argmax())
    plain = sampling.gumbel_sample(x, SEEDS, POSITIONS, stream=4, backend=backend).tolist()
    noise = gumbel_noise(SEEDS, POSITIONS, vocab_size=700, stream=4)
    assert plain[0] == int((x[0].double() + noise[0]).argmax())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_noise_is_finite_and_wins_nothing_that_is_masked(backend) -> None:
    # A word of all ones is u = 1 in fp32: its noise must stay finite, and -inf plus it must not become NaN.
    ids = torch.arange(1 << 12).unsqueeze(0)
    seeds = torch.arange(1600)
    words = torch.stack([noise_words(s[None], torch.zeros(1), ids, 0)[0] for s in seeds])
    seed, token = divmod(int(words.argmax()), words.shape[1])
    assert float(words.max()) > 2**32 - 2**12
    x = torch.zeros(1, 1 << 12)
    own = sampling.gumbel_sample(x, seeds[seed : seed + 1], torch.zeros(1, dtype=torch.int64), backend=backend)  # fmt: skip
    assert own.tolist() == [token]
    x[0, token] = -math.inf
    own = sampling.gumbel_sample(x, seeds[seed : seed + 1], torch.zeros(1, dtype=torch.int64), backend=backend)  # fmt: skip
    assert own.tolist() != [token]
    assert 0 <= int(own) < 1 << 12


def test_equal_logits_are_drawn_equally_often() -> None:
    x = torch.full((4000, 10), 2.5)
    zero = torch.zeros(4000, dtype=torch.int64)
    found = sampling.gumbel_sample(x, torch.arange(4000), zero, backend="torch")
    counts = torch.bincount(found, minlength=10).double()
    assert (
        float(((counts - 400) ** 2 / 400).sum()) < 27.9
    )  # chi-square, 9 degrees of freedom, 0.1 %
    kept = sampling.top_k_top_p_sample(x, torch.arange(4000), zero, 4, backend="torch")
    counts = torch.bincount(kept, minlength=10).double()
    assert counts[4:].sum() == 0  # equal logits rank by token id
    assert float(((counts[:4] - 1000) ** 2 / 1000).sum()) < 16.3


FILTERS = {
    "top-k": {"top_k": 20},
    "top-k and top-p": {"top_k": 20, "top_p": 0.8},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "top-k of all": {"top_k": 5000, "top_p": 0.5},
    "all, by rows": {
        "top_k": torch.tensor([0, 5, 10, 33, 500, 1]),
        "top_p": torch.tensor([0.5, 1.0, 0.3, 0.7, 0.95, 1.5]),
        "min_p": torch.tensor([0.0, 0.1, 0.0, 0.0, 0.001, 1.0], dtype=torch.float64),
    },
}


def column(value, rows: int, default: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows,), default if value is None else value, dtype=dtype) if not isinstance(value, torch.Tensor) else value.to(dtype)  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FILTERS)
def test_what_stays_is_what_the_samplers_filters_keep(backend, name) -> None:
    warm = torch.tensor([0.5, 1.0, 2.0, 0.7, 1.0, 3.0]) if name != "top-p" else None
    x = randn(6, 300, seed=4) * 3
    x[1] = torch.randint(-2, 3, (300,), generator=torch.Generator().manual_seed(1)).float()
    x[3] = 1.5
    x[4, 100:] = -math.inf
    keys = FILTERS[name]
    out = sampling.top_k_top_p_mask(x, temperature=warm, backend=backend, **keys)
    double = torch.float64
    kept = filter_logits(
        x,
        column(warm, 6, 1.0, double),
        column(keys.get("top_k"), 6, 0, torch.int64),
        column(keys.get("top_p"), 6, 1.0, double),
        column(keys.get("min_p"), 6, 0.0, double),
    )
    stays = kept.scores > -math.inf
    for row in range(6):
        wanted = sorted(kept.token_ids[row][stays[row]].tolist())
        assert (out[row] > -math.inf).nonzero().flatten().tolist() == wanted, row
        assert torch.equal(out[row, wanted], x[row, wanted])
    if backend == "triton" and name not in ("top-k and top-p", "all, by rows"):
        return  # the interpreter takes long, and draws have their own tests
    token = sampling.top_k_top_p_sample(
        x, SEEDS, POSITIONS, temperature=warm, backend=backend, **keys
    )
    masked = sampling.gumbel_sample(out, SEEDS, POSITIONS, temperature=warm)
    assert token.tolist() == masked.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_cannot_be_drawn_stay_as_they_are(backend) -> None:
    x = hard_rows(300)
    out = sampling.top_k_top_p_mask(x, 5, 0.5, backend=backend)
    for row in (1, 2, 5):
        assert torch.equal(out[row].nan_to_num(7.0), x[row].nan_to_num(7.0))
    token = sampling.top_k_top_p_sample(x, SEEDS, POSITIONS, 5, 0.5, backend=backend)
    assert token[[1, 2, 5]].tolist() == [-1, -1, -1]
    cold = torch.zeros(6)
    token = sampling.top_k_top_p_sample(x, SEEDS, POSITIONS, 0, 0.5, temperature=cold, backend=backend)  # fmt: skip
    assert token.tolist() == sampling.argmax_sample(x).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bitmasks_with_strides_rows_and_a_padded_vocabulary(backend) -> None:
    wide = randn(5, 90, 3)
    x = wide.permute(0, 2, 1)[:, 1]
    before = x.clone()
    mask = torch.full((3, 6), -1, dtype=torch.int32)[:, ::2]
    mask[0, 1] = 0x0F0F0F0F
    mask[2] = 0
    rows = torch.tensor([4, -1, 0])
    assert sampling.apply_token_bitmask(x, mask, rows=rows, vocab_size=70, backend=backend) is x
    assert torch.equal(x[1:4], before[1:4])
    assert bool((x[0] == -math.inf).all())
    for t in range(90):
        allowed = t < 70 and (t < 32 or t >= 64 or (0x0F0F0F0F >> (t - 32)) & 1)
        assert x[4, t] == (before[4, t] if allowed else -math.inf)
    assert torch.equal(wide[:, :, 0], randn(5, 90, 3)[:, :, 0])
    with pytest.raises(ShapeError, match="vocab_size is 97"):
        sampling.apply_token_bitmask(x, mask, rows=rows, vocab_size=97)
    with pytest.raises(ShapeError, match="bitmask has 3 rows for 5"):
        sampling.apply_token_bitmask(x, mask)


@pytest.mark.parametrize("backend", BACKENDS)
def test_penalties_are_the_samplers(backend) -> None:
    x = randn(3, 80)
    output = torch.tensor([[3, 3, 5, -1], [79, 80, 1, 1], [-1, -1, -1, -1]])
    prompt = torch.tensor([[5, 9, 9], [-1, -1, -1], [2, 100, 3]], dtype=torch.int32)
    presence, frequency = torch.tensor([0.5, 0.0, 1.0]), torch.tensor([0.25, 1.0, 1.0])
    repetition = torch.tensor([1.3, 1.0, 0.5])
    wanted = x.clone()
    for row in range(3):
        penalise_row(
            wanted[row],
            [t for t in output[row].tolist() if t >= 0],
            prompt_ids=torch.tensor(sorted({t for t in prompt[row].tolist() if 0 <= t < 80}), dtype=torch.int64),
            presence_penalty=float(presence[row]),
            frequency_penalty=float(frequency[row]),
            repetition_penalty=float(repetition[row]),
        )  # fmt: skip
    keys = {"presence": presence, "frequency": frequency, "repetition": repetition}
    sampling.apply_penalties(x, output, prompt_ids=prompt, backend=backend, **keys)
    assert torch.equal(x, wanted)
    again = sampling.apply_penalties(x, output[:, :0], backend=backend, **keys)
    assert torch.equal(again, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probabilities_and_ranks(backend) -> None:
    x = randn(3, 500, seed=2) * 4
    x[1] = torch.randint(-2, 3, (500,), generator=torch.Generator().manual_seed(1)).float()
    tokens = torch.tensor([17, 44, -1])
    own, ranks, ids, best = sampling.log_probs(x, tokens, 6, backend=backend)
    wanted = token_logprobs(x[:2], tokens[:2], [6, 6])
    for row, entry in enumerate(wanted):
        assert math.isclose(float(own[row]), entry.logprob, abs_tol=2e-6)
        assert int(ranks[row]) == entry.rank
        assert ids[row].tolist() == [token for token, _ in entry.top]
        assert best[row].tolist() == pytest.approx([value for _, value in entry.top], abs=2e-6)
    assert own[2].isnan()
    assert int(ranks[2]) == 0
    own, ranks, ids, best = sampling.log_probs(x[:, :3], tokens, 5, backend=backend)
    assert ids.shape == best.shape == (3, 5)
    assert ids[0, 3:].tolist() == [-1, -1]
    assert best[0, 3:].tolist() == [-math.inf] * 2
    assert own.isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probabilities_that_there_are_not(backend) -> None:
    """Those of a row with +inf, NaN or -inf alone; ids and ranks are there all the same."""
    x = randn(4, 50)
    x[0, 3], x[1, [3, 7]], x[2], x[3, 5] = math.inf, math.inf, -math.inf, math.nan
    for token in (3, 4):
        own, ranks, ids, best = sampling.log_probs(x, torch.full((4,), token), 3, backend=backend)
        assert own.isnan().all()
        assert best.isnan().all()
        assert (ranks > 0).all()
    assert ids[1, :2].tolist() == [3, 7]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_and_rows_that_lie_apart(backend) -> None:
    x = randn(4, 300)
    none = torch.empty(0, dtype=torch.int64)
    assert sampling.argmax_sample(x[:0], backend=backend).shape == (0,)
    assert sampling.gumbel_sample(x[:0], none, none, backend=backend).shape == (0,)
    assert sampling.top_k_top_p_sample(x[:0], none, none, 5, 0.5, backend=backend).shape == (0,)
    assert sampling.top_k_top_p_mask(x[:0], 5, backend=backend).shape == (0, 300)
    assert sampling.log_probs(x[:0], none, 2, backend=backend)[2].shape == (0, 2)
    wide = torch.full((4, 500), math.nan)
    wide[:, 100:400] = x
    view = wide[:, 100:400]
    seeds, positions = SEEDS[:4], POSITIONS[:4]
    keys = {"backend": backend}
    assert torch.equal(sampling.argmax_sample(view, **keys), x.argmax(-1))
    a = sampling.top_k_top_p_sample(view, seeds, positions, 9, 0.9, **keys)
    assert torch.equal(a, sampling.top_k_top_p_sample(x, seeds, positions, 9, 0.9))
    out = torch.full((4, 310), 777.0)
    sampling.top_k_top_p_mask(view, 9, out=out[:, 5:305], **keys)
    assert torch.equal(out[:, 5:305], sampling.top_k_top_p_mask(x, 9))
    assert bool((out[:, :5] == 777).all() and (out[:, 305:] == 777).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_gives_the_same_token_alone_and_beside_nan(backend) -> None:
    x = randn(5, 400, seed=8) * 3
    whole = sampling.top_k_top_p_sample(x, SEEDS[:5], POSITIONS[:5], 9, 0.9, backend=backend)
    x[[0, 1, 3]] = math.nan
    beside = sampling.top_k_top_p_sample(x, SEEDS[:5], POSITIONS[:5], 9, 0.9, backend=backend)
    assert beside.tolist() == [-1, -1, int(whole[2]), -1, int(whole[4])]
    alone = sampling.top_k_top_p_sample(x[2:3], SEEDS[2:3], POSITIONS[2:3], 9, 0.9, backend=backend)
    assert int(alone) == int(whole[2])


def test_wrong_arguments_are_refused() -> None:
    x = randn(2, 10)
    two = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ShapeError, match="vocabulary of 0"):
        sampling.argmax_sample(x[:, :0])
    with pytest.raises(ShapeError, match="logits has dtype float64"):
        sampling.argmax_sample(x.double())
    with pytest.raises(ShapeError, match="last axis"):
        sampling.argmax_sample(x.T)
    with pytest.raises(ShapeError, match="seeds has shape"):
        sampling.gumbel_sample(x, two[:1], two)
    with pytest.raises(ShapeError, match="top_p is nan"):
        sampling.top_k_top_p_mask(x, top_p=math.nan)
    with pytest.raises(ShapeError, match="top_k has dtype float32"):
        sampling.top_k_top_p_mask(x, torch.zeros(2))
    with pytest.raises(ShapeError, match="out has dtype"):
        sampling.top_k_top_p_mask(x, 3, out=x.bfloat16())
    with pytest.raises(ShapeError, match="num_top is 5000"):
        sampling.log_probs(x, two, 5000)


@pytest.mark.skipif(INTERPRETED, reason="the compiler of torch is not for the interpreter")
def test_operations_of_torch() -> None:
    ops, x = torch.ops.deepinfer, randn(3, 40)
    three = torch.zeros(3, dtype=torch.int64)
    out = torch.empty(3, dtype=torch.int64)
    warm = torch.ones(3)
    torch.library.opcheck(ops.argmax_sample, (None, x, out))
    torch.library.opcheck(ops.gumbel_sample, (None, x, None, three, three, 0, out))
    filters = (x, warm, three + 4, warm * 0.5, None)
    torch.library.opcheck(ops.top_k_top_p_mask, (None, *filters, 0, torch.empty_like(x)))
    torch.library.opcheck(ops.top_k_top_p_sample, (None, *filters, three, three, 0, 0, out))
    bits = torch.full((3, 2), 5, dtype=torch.int32)
    torch.library.opcheck(ops.apply_token_bitmask, (None, x.clone(), bits, None, 40))
    ids = torch.zeros((3, 4), dtype=torch.int64)
    torch.library.opcheck(ops.apply_penalties, (None, x.clone(), ids, None, warm, warm, warm))
    best = torch.zeros((3, 2), dtype=torch.int32)
    torch.library.opcheck(
        ops.log_probs,
        (None, x, three, best, torch.empty(3), out, torch.empty_like(best), torch.empty(3, 2)),
    )

    def step(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        y = sampling.apply_token_bitmask(x.clone(), bits)
        y = sampling.top_k_top_p_mask(y, 5, 0.9)
        return sampling.gumbel_sample(y, three, three) + sampling.argmax_sample(y)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, bits), step(x, bits))


@pytest.mark.skipif(INTERPRETED, reason="the compiler of torch is not for the interpreter")
def test_one_graph_holds_penalties_draws_and_log_probabilities() -> None:
    three, one = torch.tensor([3, 0, 7]), torch.ones(3)
    ids = torch.tensor([[1, 1, -1], [5, 2, 9], [-1, -1, -1]])

    def step(x: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
        y = sampling.apply_penalties(
            x.clone(), ids, prompt_ids=ids[:, 1:], presence=one, frequency=one * 0.5, repetition=one * 1.3
        )  # fmt: skip
        token = sampling.top_k_top_p_sample(y, three, three, 9, 0.9)
        return y, token, *sampling.log_probs(y, token, num_top)

    x = randn(3, 40)
    for num_top in (0, 4):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for own, wanted in zip(compiled(x, num_top), step(x, num_top), strict=True):
            assert torch.equal(own, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_temperature_or_share_of_nan_draws_nothing(backend) -> None:
    x, nan = torch.zeros(1, 1), torch.full((1,), math.nan)
    one = torch.ones(1, dtype=torch.int64)
    for keys in ({"temperature": nan}, {"min_p": nan}, {"min_p": torch.full((1,), 2.0)}):
        for top_k in (0, 1):
            found = sampling.top_k_top_p_sample(x, one, one, top_k, 0.5, backend=backend, **keys)
            assert found.tolist() == [-1]
    assert sampling.gumbel_sample(x, one, one, temperature=nan, backend=backend).tolist() == [0]
    found = sampling.top_k_top_p_sample(x, one, one, temperature=nan, backend=backend)
    assert found.tolist() == [-1]
    # A top-p of NaN keeps the highest alone.
    found = sampling.top_k_top_p_sample(randn(1, 9), one, one, 0, nan, backend=backend)
    assert found.tolist() == [int(randn(1, 9).argmax())]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_endless_temperature_draws_nothing_that_is_dropped(backend) -> None:
    logits, numbers = torch.randn(8, 50), torch.arange(8)
    logits[:, 1::2] = -torch.inf
    warm = torch.full((8,), torch.inf)
    found = sampling.gumbel_sample(logits, numbers, numbers, temperature=warm, backend=backend)
    assert (found % 2 == 0).all()
    found = sampling.top_k_top_p_sample(
        logits, numbers, numbers, 3, temperature=warm, backend=backend
    )
    assert (logits.topk(3).indices == found[:, None]).any(1).all()
    assert len(set(found.tolist())) > 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_least_share_below_zero_drops_nothing(backend) -> None:
    logits = torch.randn(3, 40)
    kept = sampling.top_k_top_p_mask(logits, min_p=torch.tensor([-1.0, 0.0, -0.5]), backend=backend)
    assert torch.equal(kept, logits)


def test_purposes_of_the_noise_are_words_of_32_bits() -> None:
    x, one = randn(1, 30), torch.ones(1, dtype=torch.int64)
    sampling.gumbel_sample(x, one, one, stream=2**32 - 1)
    for stream in (-1, 2**32):
        with pytest.raises(ShapeError, match="in \\[0, 2"):
            sampling.gumbel_sample(x, one, one, stream=stream)
        with pytest.raises(ShapeError, match=f"stream is {stream}"):
            sampling.top_k_top_p_sample(x, one, one, 3, stream=stream)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_behind_32_bits_are_no_tokens_for_penalties(backend) -> None:
    x = torch.ones(1, 3)
    ids = torch.tensor([[2**32 + 1, 2, 2**40]])
    one = torch.ones(1)
    sampling.apply_penalties(x, ids, presence=one, frequency=one, repetition=one, backend=backend)
    assert x.tolist() == [[1.0, 1.0, -1.0]]


@pytest.mark.skipif(not INTERPRETED, reason="a form of the kernels")
def test_rows_in_several_chunks_give_the_same() -> None:
    from deepinfer.kernels.reference import sampling as reference
    from deepinfer.kernels.triton import sampling_launch as launch

    x, small = randn(2, 600, seed=3) * 3, (256, 1)
    seeds, positions = SEEDS[:2], POSITIONS[:2]
    out, wanted = torch.empty((2, 2), dtype=torch.int64).unbind(0)
    launch.highest_tokens(x, out, small)
    assert torch.equal(out, x.argmax(-1))
    launch.best_tokens(x, out, seeds, positions, sizes=small)
    reference.gumbel_sample(x, None, seeds, positions, 0, wanted)
    assert torch.equal(out, wanted)
    half = torch.full((2,), 0.5)
    for filters in (
        launch.Filters(None, torch.tensor([30, 9]), half, None, 30),
        launch.Filters(None, None, half + 0.4, half * 0.01, 0),
    ):
        launch.draw_filtered(x, filters, launch.Draw(seeds, positions, 0, out), sizes=small)
        reference.top_k_top_p_sample(x, *filters[:4], seeds, positions, 0, 0, wanted)
        assert torch.equal(out, wanted)


def rows_of_every_kind(vocab: int) -> torch.Tensor:
    """Random, NaN, equal, masked, one token, few values."""
    x = randn(8, vocab, seed=5) * 2
    x[1, 3] = math.nan
    x[2] = 0.5
    x[3, 5:] = -math.inf
    x[4] = -20.0
    x[4, vocab // 2] = 20.0
    x[5] = torch.randint(-1, 2, (vocab,), generator=torch.Generator().manual_seed(1)).float()
    return x


OPTIONS = {
    "warm": torch.tensor([1.0, 1.0, 0.7, 1.0, 2.0, 0.5, 0.0, math.nan], dtype=torch.float64),
    "top_k": torch.tensor([9, 3, 0, 50, 299, 100, 5, 4]),
    "top_p": torch.tensor([0.3, 0.5, 0.6, 0.9, 0.0, 0.5, 0.4, 0.5]),
    "min_p": torch.full((8,), 0.01),
}
KINDS = {
    "p": ("top_p",),
    "warm p": ("warm", "top_p"),
    "k": ("warm", "top_k"),
    "both": ("top_k", "top_p"),
    "min": ("min_p",),
    "all": ("warm", "top_k", "top_p", "min_p"),
}


def filters_of(kind: str, widest: int = 0):
    from deepinfer.kernels.triton import sampling_launch as launch

    names = ("warm", "top_k", "top_p", "min_p")
    return launch.Filters(*(OPTIONS[n] if n in KINDS[kind] else None for n in names), widest)


@pytest.mark.skipif(not INTERPRETED, reason="a form of the kernels")
@pytest.mark.parametrize("sample", [256, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_from_bounds_of_a_sample_are_those_of_the_reference(kind, sample) -> None:
    from deepinfer.kernels.reference import sampling as reference
    from deepinfer.kernels.triton import sampling_launch as launch

    # Samples of 256 are of a part of the row: their bounds may be wrong, and what comes out may not.
    x, sizes = rows_of_every_kind(500), (256, 1)
    seeds, positions = torch.arange(8) * 99 + sample, torch.arange(8)
    out, wanted = torch.empty((2, 8), dtype=torch.int64).unbind(0)
    filters = filters_of(kind)
    cuts = None
    if kind not in ("p", "warm p"):
        cuts = launch.cut_rows(x, filters, sizes, sample, 256)
    reference.top_k_top_p_sample(x, *filters[:4], seeds, positions, 0, 0, wanted)
    if filters.top_p is None:
        launch.best_tokens(x, out, seeds, positions, temperature=filters.temperature, cuts=cuts)
        assert torch.equal(out, wanted)
        if filters.min_p is not None:
            return
        # Drawn before the cut is known, and judged by ranks.
        cuts = None
    for expected in (12, 1):
        launch.draw_judged(
            x, filters, launch.Draw(seeds, positions, 0, out), cuts,
            sizes=sizes, weigh_sizes=sizes, settle_sizes=sizes, expected=expected,
        )  # fmt: skip
        assert torch.equal(out, wanted)


@pytest.mark.skipif(not INTERPRETED, reason="a form of the kernels")
@pytest.mark.parametrize("way", ["groups", "groups in short lists", "list"])
def test_draws_among_the_highest_are_those_of_the_reference(way) -> None:
    from deepinfer.kernels.reference import sampling as reference
    from deepinfer.kernels.triton import sampling_launch as launch

    x = rows_of_every_kind(500)
    seeds, positions = torch.arange(8) * 99, torch.arange(8)
    out, wanted = torch.empty((2, 8), dtype=torch.int64).unbind(0)
    draw = launch.Draw(seeds, positions, 0, out)
    # Equal logits are more than a short list holds: they are searched as a whole.
    sizes = {"sizes": (256, 1), "capacity": 512 if way == "groups" else 256}
    for kind in ("k", "both", "all"):
        filters = filters_of(kind)._replace(top_k=OPTIONS["top_k"].clamp_min(1), widest=299)
        if way == "list":
            launch.draw_selected(x, filters, draw)
        else:
            launch.cut_by_groups(x, filters, draw, **sizes)
        reference.top_k_top_p_sample(x, *filters[:4], seeds, positions, 0, 0, wanted)
        assert torch.equal(out, wanted)


@pytest.mark.skipif(not INTERPRETED, reason="a form of the kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_masks_from_bounds_of_a_sample_are_those_of_the_reference(kind) -> None:
    from deepinfer.kernels.reference import sampling as reference
    from deepinfer.kernels.triton import sampling_launch as launch

    x, sizes = rows_of_every_kind(500), (256, 1)
    filters = filters_of(kind)
    wanted = torch.empty_like(x)
    reference.top_k_top_p_mask(x, *filters[:4], 0, wanted)
    for sample, capacity in ((256, 128), (512, 512)):
        cuts = None
        if kind != "p":
            cuts = launch.cut_rows(x, filters, sizes, sample, capacity)
        if filters.top_p is not None:
            passes = 3 if sample == 256 else 0
            cuts = launch.cut_mass(x, filters, cuts, sizes, passes=passes, capacity=capacity)
        out = torch.full_like(x, 777.0)
        launch.apply_cuts(x, cuts, out)
        assert torch.equal(out.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_logits_are_kept_as_far_as_top_k_goes_when_top_p_takes_all_of_them(backend) -> None:
    # The cut of top-p is among tokens equal to that of top-k: it may not let more of them in.
    x = torch.full((3, 300), 1.5)
    x[1, 7] = 9.0
    top_k, top_p = torch.tensor([1, 3, 9]), torch.tensor([0.2, 0.9999999, 0.95])
    out = sampling.top_k_top_p_mask(x, top_k, top_p, backend=backend)
    kept = [(row > -math.inf).nonzero().flatten().tolist() for row in out]
    assert kept == [[0], [0, 1, 7], [0, 1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.mark.skipif(not INTERPRETED, reason="a form of the kernels")
def test_bounds_at_zero_hold_both_zeros() -> None:
    from deepinfer.kernels.reference import sampling as reference
    from deepinfer.kernels.triton import sampling_launch as launch

    x, sizes = torch.zeros(2, 500), (256, 1)
    x[:, ::3] = -0.0
    x[1, 300:] = -1e-45
    seeds, positions = torch.tensor([3, 4]), torch.tensor([5, 6])
    out, wanted = torch.empty((2, 2), dtype=torch.int64).unbind(0)
    filters = launch.Filters(None, torch.tensor([400, 310]), torch.full((2,), 0.9), None, 0)
    reference.top_k_top_p_sample(x, *filters[:4], seeds, positions, 0, 0, wanted)
    masked = torch.empty_like(x)
    reference.top_k_top_p_mask(x, *filters[:4], 0, masked)
    for expected in (1, 12):
        cuts = launch.cut_rows(x, filters, sizes)
        launch.draw_judged(
            x, filters, launch.Draw(seeds, positions, 0, out), cuts,
            sizes=sizes, weigh_sizes=sizes, settle_sizes=sizes, expected=expected,
        )  # fmt: skip
        assert torch.equal(out, wanted)
    own = torch.empty_like(x)
    launch.mask_filtered(x, filters, own)
    assert torch.equal(own, masked)

from __future__ import annotations

import math
import pickle
from collections import Counter

import pytest
import torch

from deepinfer.core.errors import ConfigError, InvalidRequest, ShapeError
from deepinfer.core.params import SamplingParams
from deepinfer.core.protocols import LogitsProcessor, SampleRows
from deepinfer.core.protocols import Sampler as SamplerProtocol
from deepinfer.core.types import Request
from deepinfer.sampling import (
    FAILED_TOKEN,
    AllowTokens,
    ForbidTokens,
    InvalidLogits,
    PerRequest,
    Sampler,
    child_seed,
    gumbel_noise,
)


def make_rows(params, positions=None, seeds=None, outputs=None, prompt=(1, 2)):
    count = len(params)
    return SampleRows(
        requests=tuple(
            Request(rid=f"r{i}", prompt_token_ids=prompt, params=p) for i, p in enumerate(params)
        ),
        positions=tuple(positions or [0] * count),
        seeds=tuple(seeds or [0] * count),
        output_token_ids=tuple(outputs) if outputs is not None else tuple(() for _ in params),
    )


def sample(logits, params, sampler=None, **options):
    masks = options.pop("masks", None)
    return (sampler or Sampler())(logits, make_rows(params, **options), masks)


def randn(*shape, seed=0, scale=2.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.05, temperature=1.3),
    SamplingParams(top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(presence_penalty=1.0, repetition_penalty=1.5),
    SamplingParams(logit_bias={3: 5.0}, logprobs=2),
]


def test_greedy_takes_the_highest_logit_and_the_lowest_id_of_equals():
    logits = torch.zeros(3, 100)
    logits[0, [7, 50, 99]] = 2.0
    logits[2, 99] = 1e-30
    out = sample(logits, [SamplingParams(temperature=0)] * 3)
    assert out.token_ids.tolist() == [7, 0, 99]
    assert out.errors == ()
    assert out.logprobs == ()


@pytest.mark.parametrize("vocab", [2, 7, 33, 4099, 129_280])
def test_greedy_ties_at_any_place(vocab):
    places = sorted({0, 1, vocab // 3, vocab // 2, vocab - 2, vocab - 1})
    for low in places:
        row = torch.full((1, vocab), -1.0)
        row[0, [p for p in places if p >= low]] = 3.0
        assert sample(row, [SamplingParams(temperature=0)]).token_ids.tolist() == [low]


def test_the_draw_is_the_documented_gumbel_maximum():
    logits = randn(1, 500)
    for position in range(30):
        out = sample(logits, [SamplingParams(temperature=0.8)], positions=[position], seeds=[9])
        noise = gumbel_noise([9], [position], vocab_size=500)
        want = int((logits.double() / 0.8 + noise).argmax())
        assert out.token_ids.tolist() == [want]


def test_wide_filters_choose_as_no_filter_does():
    logits = randn(1, 3000)
    for position in range(20):
        plain = sample(logits, [SamplingParams()], positions=[position], seeds=[4])
        for params in (
            SamplingParams(top_p=1 - 1e-12),
            SamplingParams(top_k=2999),
            SamplingParams(min_p=1e-30),
        ):
            other = sample(logits, [params], positions=[position], seeds=[4])
            assert other.token_ids.tolist() == plain.token_ids.tolist()


def test_a_row_does_not_depend_on_its_batch():
    params = MIXED * 3
    count = len(params)
    logits = randn(count, 2000, seed=3)
    positions = list(range(count))
    seeds = [i * 7 for i in range(count)]
    outputs = [[i, i + 1, i] for i in range(count)]
    whole = sample(logits, params, positions=positions, seeds=seeds, outputs=outputs)
    for shift in (1, 5):
        order = [(i * 5 + shift) % count for i in range(count)]
        mixed = sample(
            logits[order],
            [params[i] for i in order],
            positions=[positions[i] for i in order],
            seeds=[seeds[i] for i in order],
            outputs=[outputs[i] for i in order],
        )
        assert mixed.token_ids.tolist() == [int(whole.token_ids[i]) for i in order]
        assert list(mixed.logprobs) == [whole.logprobs[i] for i in order]
    for i in range(count):
        alone = sample(
            logits[i : i + 1],
            params[i : i + 1],
            positions=[positions[i]],
            seeds=[seeds[i]],
            outputs=[outputs[i]],
        )
        assert alone.token_ids.tolist() == [int(whole.token_ids[i])]
        if params[i].logprobs is not None:
            assert alone.logprobs[0] == whole.logprobs[i]


def test_seeded_rows_beside_an_unseeded_one_agree():
    logits = randn(3, 1000, seed=5)[:1].expand(3, -1).contiguous()
    params = [SamplingParams(seed=1), SamplingParams(), SamplingParams(seed=1)]
    for position in range(20):
        ids = sample(
            logits, params, positions=[position] * 3, seeds=[1, 12345, 1]
        ).token_ids.tolist()
        assert ids[0] == ids[2]


def test_samples_of_one_prompt_differ():
    logits = torch.zeros(64, 50_000)
    seeds = [child_seed(3, i) for i in range(64)]
    ids = sample(logits, [SamplingParams()] * 64, seeds=seeds).token_ids.tolist()
    assert len(set(ids)) > 60


def chi_square_limit(df):
    """About the 1 - 3e-5 quantile (Wilson and Hilferty)."""
    a = 2 / (9 * df)
    return df * (1 - a + 4.0 * math.sqrt(a)) ** 3


@pytest.mark.parametrize(
    ("params", "law"),
    [
        (SamplingParams(), [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]),
        (SamplingParams(temperature=0.5), [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]),
        (SamplingParams(top_k=3), [0.5, 0.3125, 0.1875, 0, 0, 0]),
        (SamplingParams(top_p=0.75), [0.5, 0.3125, 0.1875, 0, 0, 0]),
        (SamplingParams(min_p=0.24), [4 / 9, 2.5 / 9, 1.5 / 9, 1 / 9, 0, 0]),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p"],
)
def test_tokens_follow_the_law(params, law):
    base = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]
    if params.temperature != 1.0:
        powers = [p ** (1 / params.temperature) for p in base]
        law = [p / sum(powers) for p in powers]
    draws = 12_000
    place = [5, 0, 3, 1, 4, 2]  # not sorted by id
    row = torch.empty(6)
    for index, p in zip(place, base, strict=True):
        row[index] = math.log(p)
    counts: Counter[int] = Counter()
    # half over positions of one seed, half over seeds at one position
    for seeds, positions in (
        ([77] * (draws // 2), list(range(draws // 2))),
        (list(range(draws // 2)), [3] * (draws // 2)),
    ):
        logits = row.expand(draws // 2, -1).contiguous()
        ids = sample(logits, [params] * (draws // 2), seeds=seeds, positions=positions).token_ids
        counts.update(ids.tolist())
    chi2 = 0.0
    for index, p in zip(place, law, strict=True):
        if p == 0:
            assert counts[index] == 0
        else:
            chi2 += (counts[index] - draws * p) ** 2 / (draws * p)
    assert chi2 < chi_square_limit(sum(p > 0 for p in law) - 1)


def test_bad_rows_are_flagged_and_good_ones_are_not_touched():
    logits = randn(6, 50)
    good = sample(logits, [SamplingParams(top_k=3)] * 6, seeds=[1] * 6).token_ids.tolist()
    logits[1, 7] = math.nan
    logits[2] = -math.inf
    logits[3, 4] = math.inf
    for params in (
        SamplingParams(top_k=3),
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.5, logprobs=3),
    ):
        out = sample(logits, [params] * 6, seeds=[1] * 6)
        ids = out.token_ids.tolist()
        assert ids[1:4] == [FAILED_TOKEN] * 3
        assert min(ids[0], *ids[4:]) >= 0
        assert [e and e.kind for e in out.errors] == [
            None,
            "nan",
            "all_masked",
            "infinite",
            None,
            None,
        ]
        assert out.errors[1].rid == "r1"
        assert "r2" in str(out.errors[2])
        if params.top_k == 3:
            assert [ids[0], *ids[4:]] == [good[0], *good[4:]]
        if params.logprobs:
            assert [e is None for e in out.logprobs] == [False, True, True, True, False, False]
    error = pickle.loads(pickle.dumps(out.errors[2]))
    assert isinstance(error, InvalidLogits)
    assert isinstance(error, ArithmeticError)
    assert error.kind == "all_masked"


def test_a_bias_past_the_vocabulary_fails_its_row_only():
    params = [SamplingParams(temperature=0), SamplingParams(logit_bias={999: 1.0}, logprobs=1)]
    out = sample(randn(2, 50), params)
    assert out.token_ids[0] >= 0
    assert out.token_ids[1] == FAILED_TOKEN
    assert out.errors[0] is None
    assert isinstance(out.errors[1], InvalidRequest)
    assert out.errors[1].rid == "r1"


def test_the_caller_keeps_his_logits():
    logits = randn(8, 200)
    before = logits.clone()
    sample(logits, MIXED, outputs=[[1, 2]] * 8, sampler=Sampler(processors=[ForbidTokens([1])]))
    assert torch.equal(logits, before)


def test_penalties_bias_and_prompt_cache():
    logits = torch.tensor([[1.0, 0.9, 0.8, 0.7]])
    sampler = Sampler()
    params = [SamplingParams(temperature=0, repetition_penalty=2.0)]
    assert sample(logits, params, sampler, prompt=(0,)).token_ids.tolist() == [1]
    # the same id with another prompt must not see the old one
    assert sample(logits, params, sampler, prompt=(1,)).token_ids.tolist() == [0]
    assert sample(logits, params, sampler, prompt=(0,), outputs=[[1]]).token_ids.tolist() == [2]
    bias = [SamplingParams(temperature=0, logit_bias={3: 1.0})]
    assert sample(logits, bias).token_ids.tolist() == [3]
    with pytest.raises(ConfigError, match="output_token_ids"):
        sample(logits, params, outputs=[])


def test_masks_bind_after_everything_else():
    logits = randn(2, 40)
    mask = torch.zeros(2, 2, dtype=torch.int32)
    mask[0, 0] = 1 << 5
    mask[1, 1] = 1 << 2
    params = [SamplingParams(temperature=0, logit_bias={0: 100.0}), SamplingParams(logprobs=5)]
    out = sample(logits, params, masks=mask)
    assert out.token_ids.tolist() == [5, 34]
    assert out.logprobs[1].top == ((34, 0.0),)


def test_processors_run_in_order_on_all_rows():
    seen = []

    def force(row, request, output):
        seen.append((request.rid, list(output)))
        row[:] = -math.inf
        row[[4, 6][len(output)]] = 0.0

    sampler = Sampler(processors=[AllowTokens([1, 2]), PerRequest(force, rids=["r1"])])
    params = [SamplingParams(temperature=0), SamplingParams()]
    logits = torch.arange(10.0).repeat(2, 1)
    assert sample(logits, params, sampler, outputs=[[], []]).token_ids.tolist() == [2, 4]
    assert sample(logits, params, sampler, outputs=[[], [4]]).token_ids.tolist() == [2, 6]
    assert seen == [("r1", []), ("r1", [4])]
    assert isinstance(sampler.processors[0], LogitsProcessor)
    with pytest.raises(ConfigError, match="in place"):
        sample(logits, params, Sampler(processors=[lambda logits, rows: logits + 1]))


def test_logprobs_are_after_penalties_and_before_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    params = SamplingParams(temperature=0.01, logprobs=1, logit_bias={1: 3.0})
    (entry,) = sample(logits, [params]).logprobs
    assert entry.token_id == 1
    assert entry.logprob == pytest.approx(4 - math.log(math.exp(2) + math.exp(4) + 1), abs=1e-7)
    (raw,) = sample(logits, [params], Sampler(raw_logprobs=True)).logprobs
    assert raw.token_id == 1
    assert raw.logprob == pytest.approx(1 - math.log(math.exp(2) + math.exp(1) + 1), abs=1e-7)
    assert raw.top[0][0] == 0


def test_wrong_shapes_are_refused():
    params = [SamplingParams()] * 2
    for logits in (
        torch.zeros(3, 4),
        torch.zeros(2),
        torch.zeros(2, 0),
        torch.zeros(2, 4, dtype=torch.bfloat16),
    ):
        with pytest.raises(ShapeError):
            sample(logits, params)
    with pytest.raises(ShapeError, match="seeds"):
        sample(torch.zeros(2, 4), params, seeds=[1])
    with pytest.raises(ShapeError, match="outputs"):
        sample(torch.zeros(2, 4), params, outputs=[[1]])


def test_no_rows():
    out = sample(torch.zeros(0, 4), [])
    assert out.token_ids.shape == (0,)
    assert out.errors == ()


def test_protocol():
    assert isinstance(Sampler(), SamplerProtocol)


def test_thread_count_does_not_matter():
    before = torch.get_num_threads()
    params = [
        SamplingParams(),
        SamplingParams(top_p=0.95),
        SamplingParams(temperature=0, logprobs=3),
    ]
    seen = set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (1, 3):
                out = sample(
                    randn(3, 129_280, seed=9)[-rows:], params[-rows:], seeds=[1, 2, 3][-rows:]
                )
                seen.add((int(out.token_ids[-1]), out.logprobs[-1]))
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 1


@pytest.mark.gpu
def test_gpu_chooses_as_the_cpu_does():
    params = MIXED * 4
    logits = randn(len(params), 5000, seed=2)
    options = {"seeds": list(range(len(params))), "outputs": [[1, 2, 3]] * len(params)}
    cpu = sample(logits, params, **options)
    gpu = sample(logits.cuda(), params, **options)
    assert cpu.token_ids.tolist() == gpu.token_ids.tolist()
    assert [e and e.rank for e in cpu.logprobs] == [e and e.rank for e in gpu.logprobs]

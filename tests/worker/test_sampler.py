"""From logits to tokens: frequencies, and independence of everything else."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.sampling_oracle import distribution
from helpers.tiers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import TokenLogprobs
from kvik.kernels.torch_ops import TORCH
from kvik.worker.sampler import Sampled, Sampler, Tokens, score, to_host
from kvik.worker.sampling_table import SamplingTable, uniform

CPU = torch.device("cpu")
PROMPT = [0, 1, 1]
OUTPUT = [2, 5, 5, 3]
STOP = frozenset({0, 6})


def table_of(*params: SamplingParams, vocab: int = 8) -> SamplingTable:
    """Return a table with request i in slot i with seed 100 + i."""
    table = SamplingTable(len(params), vocab, CPU)
    for slot, p in enumerate(params):
        table.set(slot, p, 100 + slot, PROMPT, OUTPUT, STOP)
    return table


def sample(table: SamplingTable, logits: Tensor, slots: list[int], position: int) -> Tokens:
    """Sample with immediate and with deferred checks of bad rows."""
    positions = np.full(len(slots), position)
    batch = table.batch(np.array(slots), positions)
    at_once = read(Sampler(TORCH).sample(logits, batch))
    if logits.numel() > 10**5:
        return at_once
    later = read(Sampler(TORCH, checks_at_once=False).sample(logits, batch))
    assert later.bad_rows == at_once.bad_rows and later.logprobs == at_once.logprobs
    good = [row for row in range(len(slots)) if row not in at_once.bad_rows]
    assert np.array_equal(later.token_ids[good], at_once.token_ids[good])
    assert ((later.token_ids >= 0) & (later.token_ids < logits.shape[1])).all()
    return at_once


def read(sampled: Sampled) -> Tokens:
    arrays = [tensor.numpy() for tensor in sampled.tensors]
    return sampled.read(sampled.token_ids.numpy(), arrays)


# ------------------------------------------------------------------ frequencies

N = 20000
LOGITS = [2.0, 1.0, 1.5, -1.0, 0.0, 2.2, 0.7, 1.9]

RULES = {
    "plain": {},
    "temperature low": {"temperature": 0.3},
    "temperature high": {"temperature": 5.0},
    "top_k": {"top_k": 3},
    "top_k off": {"top_k": -1},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.25},
    "typical_p": {"typical_p": 0.5},
    "presence_penalty": {"presence_penalty": 1.5},
    "presence_penalty negative": {"presence_penalty": -1.5},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "repetition_penalty below 1": {"repetition_penalty": 0.5},
    "logit_bias": {"logit_bias": {3: 4.0, 5: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": (1, 3, 4)},
    "bad_words": {"bad_words": ((7,), (5, 3, 2), (3, 5), (2, 4), (1, 5, 5))},
    "min_tokens": {"min_tokens": 5},
    "min_tokens reached": {"min_tokens": 4},
    "all together": {
        "temperature": 0.8,
        "top_k": 6,
        "top_p": 0.95,
        "min_p": 0.02,
        "typical_p": 0.97,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {4: 1.0},
        "bad_words": ((7,),),
        "min_tokens": 5,
    },
}


@pytest.mark.full
@pytest.mark.parametrize("name", RULES)
def test_frequencies_of_tokens_match_the_definition(name: str) -> None:
    params = SamplingParams(**RULES[name])
    expected = distribution(LOGITS, params, PROMPT, OUTPUT, STOP)
    # Many seeds at one position, since min_tokens depends on the position.
    table = SamplingTable(N, 8, CPU)
    for slot in range(N if params.min_tokens or params.bad_words else 1):
        table.set(slot, params, slot, PROMPT, OUTPUT, STOP)
    if params.min_tokens or params.bad_words:
        slots, positions = np.arange(N), np.full(N, len(PROMPT) + len(OUTPUT))
    else:
        slots, positions = np.zeros(N, np.int64), np.arange(N)
    logits = torch.tensor(LOGITS).expand(N, -1)
    result = Sampler(TORCH).sample(logits, table.batch(slots, positions))
    counts = np.bincount(result.token_ids, minlength=8)
    assert set(counts.nonzero()[0].tolist()) <= set(expected)
    tokens = sorted(expected)
    frequencies = [expected[t] / sum(expected.values()) * N for t in tokens]
    assert stats.chisquare(counts[tokens], frequencies).pvalue > 1e-3


def test_definition_itself_reacts_to_every_rule() -> None:
    """Otherwise the frequencies above would not test the rule."""
    plain = distribution(LOGITS, SamplingParams(), PROMPT, OUTPUT, STOP)
    for name, rule in RULES.items():
        changed = distribution(LOGITS, SamplingParams(**rule), PROMPT, OUTPUT, STOP)
        same = changed == pytest.approx(plain)
        assert same == (name in ("plain", "top_k off", "min_tokens reached")), name


# ------------------------------------------------------------------ every draw

# Binary fractions, so that float32 and the definition's float64 agree on ties.
finite = st.integers(-640, 640).map(lambda n: n / 32)
token = st.integers(0, 7)


@st.composite
def any_params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0])),
        top_k=draw(st.integers(-1, 9)),
        top_p=draw(st.sampled_from([1e-6, 0.2, 0.5, 0.93, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.1, 0.9, 1.0])),
        typical_p=draw(st.sampled_from([0.05, 0.5, 0.9, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.75, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.75, -2.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 4.0])),
        logit_bias=draw(st.none() | st.dictionaries(token, st.sampled_from([-100.0, -1.0, 3.0]))),
        allowed_token_ids=draw(
            st.none() | st.lists(token, min_size=1, unique=True).map(lambda ids: (*ids, 1))
        ),
        bad_words=draw(st.sampled_from([(), ((2,),), ((3, 4), (5, 3, 5), (7, 7))])),
        min_tokens=draw(st.sampled_from([0, 4, 5])),
    )


@pytest.mark.full
@settings(max_examples=examples(200))
@given(st.lists(finite, min_size=8, max_size=8), any_params())
def test_only_tokens_of_the_definition_are_drawn(logits: list[float], params: SamplingParams):
    position, draws = len(PROMPT) + len(OUTPUT), 16
    table = SamplingTable(draws, 8, CPU)
    for slot in range(draws):
        table.set(slot, params, slot, PROMPT, OUTPUT, STOP)
    rows = torch.tensor(logits).expand(draws, -1)
    result = sample(table, rows, list(range(draws)), position)
    assert not result.bad_rows
    # Rounding may move a token across the limit of a rule, so a little more is allowed.
    wider = params.with_changes(
        top_p=min(1.0, params.top_p + 1e-5),
        typical_p=min(1.0, params.typical_p + 1e-5),
        min_p=max(0.0, params.min_p - 1e-5),
    )
    allowed = set(distribution(logits, params, PROMPT, OUTPUT, STOP))
    allowed |= set(distribution(logits, wider, PROMPT, OUTPUT, STOP))
    assert set(result.token_ids.tolist()) <= allowed


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    params = SamplingParams(temperature=0.9, top_k=5)
    result = sample(table_of(params), torch.tensor([LOGITS]), [0], 41)
    u = uniform(np.array([100], np.uint64), np.array([41]))[0]
    expected = distribution(LOGITS, params)
    reached = 0.0
    for token in sorted(expected):
        reached += expected[token]
        if reached > u:
            break
    assert result.token_ids.tolist() == [token]


@pytest.mark.parametrize(("u", "expected"), [(0.0, 1), (1.0 - 2**-53, 5)])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(u: float, expected: int) -> None:
    batch = table_of(SamplingParams(top_k=3)).batch(np.zeros(1, np.int64), np.zeros(1, np.int64))
    batch.random.draws.uniforms.fill_(u)
    logits = torch.tensor([[1.0, 2.0, 1.5, -1.0, 2.2, 1.9, 0.7, 0.0]])  # 1, 4 and 5 stay
    assert Sampler(TORCH).sample(logits, batch).token_ids.item() == expected


# ------------------------------------------------------------------ greedy


def test_greedy_rows_take_the_most_likely_token_after_their_rules() -> None:
    params = [SamplingParams(**{**rule, "temperature": 0}) for rule in RULES.values()]
    rows, slots = torch.tensor([LOGITS] * len(params)), list(range(len(params)))
    result = sample(table_of(*params), rows, slots, len(PROMPT) + len(OUTPUT))
    expected = [distribution(LOGITS, p, PROMPT, OUTPUT, STOP) for p in params]
    assert [[token] for token in result.token_ids.tolist()] == [list(e) for e in expected]


# ------------------------------------------------------------------ independence

MANY = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.8),
    SamplingParams(top_k=200, top_p=0.95, min_p=0.01),
    SamplingParams(typical_p=0.7, temperature=1.3),
    SamplingParams(min_p=0.1, repetition_penalty=1.3),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, logprobs=2),
    SamplingParams(logit_bias={1: 5.0}, bad_words=((3,),)),
    SamplingParams(allowed_token_ids=tuple(range(0, 60, 3)), min_tokens=10, logprobs=4),
]


@pytest.mark.parametrize("vocab", [60, 5000, 40000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_depends_neither_on_the_batch_nor_on_order(vocab: int, dtype: torch.dtype) -> None:
    table = table_of(*MANY, vocab=vocab)
    generator = torch.Generator().manual_seed(vocab)
    for position in (5, 10):
        logits = (torch.randn(len(MANY), vocab, generator=generator) * 3).to(dtype)
        everyone = list(range(len(MANY)))
        expected = sample(table, logits, everyone, position)
        for slots in [*[[i] for i in everyone], everyone[::-1], everyone[::2], [2, 0], [7, 9, 3]]:
            found = sample(table, logits[slots], slots, position)
            assert np.array_equal(found.token_ids, expected.token_ids[slots])
            for row, slot in enumerate(slots):
                assert found.logprobs.get(row) == expected.logprobs.get(slot)


def test_seed_and_position_decide_the_draw() -> None:
    logits = torch.zeros(1, 50000)
    drawn = {}
    for seed in (-1, 0, 1, 2**63 - 1, -(2**63)):
        table = SamplingTable(1, 50000, CPU)
        table.set(0, SamplingParams(), seed, [], [], STOP)
        for position in (0, 1, 2):
            drawn[seed, position] = sample(table, logits, [0], position).token_ids.item()
            assert sample(table, logits, [0], position).token_ids.item() == drawn[seed, position]
    assert len(set(drawn.values())) == len(drawn)


# ------------------------------------------------------------------ bad rows


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), *MANY[2:8]])
@pytest.mark.parametrize("value", [math.nan, math.inf, "all -inf"])
def test_rows_that_are_not_finite_are_reported_and_affect_no_other(params, value) -> None:
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(0))
    table = table_of(*[params] * 4, vocab=60)
    good = sample(table, logits, [0, 1, 2, 3], 7)
    broken = logits.clone()
    if value == "all -inf":
        broken[2] = -torch.inf
    else:
        broken[2, 17] = value
    result = sample(table, broken, [0, 1, 2, 3], 7)
    assert result.bad_rows == {2: "the model's logits are not finite"}
    assert 0 <= int(result.token_ids[2]) < 60 and 2 not in result.logprobs
    for row in (0, 1, 3):
        assert result.token_ids[row] == good.token_ids[row]
        assert result.logprobs.get(row) == good.logprobs.get(row)


def test_single_impossible_tokens_are_no_error() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 1.0, -torch.inf, -torch.inf] * 4]).expand(500, -1)
    table = SamplingTable(1, 20, CPU)
    table.set(0, SamplingParams(top_p=0.99), 3, [], [], STOP)
    batch = table.batch(np.zeros(500, np.int64), np.arange(500))
    result = Sampler(TORCH).sample(logits, batch)
    assert not result.bad_rows
    assert set(result.token_ids.tolist()) == {i for i in range(20) if i % 5 in (0, 2)}


def test_rules_that_exclude_all_tokens_are_reported() -> None:
    nothing = SamplingParams(allowed_token_ids=(3,), bad_words=((3,),))
    table = table_of(SamplingParams(), nothing)
    result = sample(table, torch.zeros(2, 8), [0, 1], 7)
    assert result.bad_rows == {1: "the request's rules allow no token"}


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_but_finite_logits(temperature: float, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    row = [-largest, largest, 0.0, largest, -largest]
    table = SamplingTable(1, 5, CPU)
    table.set(0, SamplingParams(temperature=temperature), 0, [], [], STOP)
    batch = table.batch(np.zeros(200, np.int64), np.arange(200))
    result = Sampler(TORCH).sample(torch.tensor([row], dtype=dtype).expand(200, -1), batch)
    assert not result.bad_rows
    assert set(result.token_ids.tolist()) == {1, 3}


def test_a_request_whose_rules_fail_can_be_found_row_by_row() -> None:
    table = table_of(SamplingParams(), SamplingParams(logit_bias={8: 1.0}), SamplingParams())
    logits = torch.tensor([LOGITS] * 3)
    with pytest.raises(IndexError):
        sample(table, logits, [0, 1, 2], 7)
    with pytest.raises(IndexError):
        sample(table, logits[1:2], [1], 7)
    tokens = [sample(table, logits[i : i + 1], [i], 7).token_ids.item() for i in (0, 2)]
    assert sample(table, logits[[0, 2]], [0, 2], 7).token_ids.tolist() == tokens


def test_logits_are_not_modified() -> None:
    logits = torch.randn(len(MANY), 60, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    sample(table_of(*MANY, vocab=60), logits, list(range(len(MANY))), 7)
    assert torch.equal(logits, before)


# ------------------------------------------------------------------ logprobs


def test_logprobs_are_of_the_raw_distribution() -> None:
    rules = SamplingParams(
        temperature=0.5, top_k=2, logit_bias={3: 9.0}, repetition_penalty=2.0, logprobs=3
    )
    result = sample(table_of(SamplingParams(), rules), torch.tensor([LOGITS] * 2), [0, 1], 7)
    assert list(result.logprobs) == [1]
    found = result.logprobs[1]
    expected = torch.tensor(LOGITS).log_softmax(-1)
    assert found.token_id == int(result.token_ids[1]) == 3
    assert found.logprob == pytest.approx(expected[3].item())
    assert found.rank == 8
    assert [token for token, _ in found.top] == [5, 0, 7]
    assert [p for _, p in found.top] == pytest.approx(expected[[5, 0, 7]].tolist())


def test_logprobs_of_zero_report_the_token_alone() -> None:
    table = table_of(
        SamplingParams(temperature=0, logprobs=0), SamplingParams(temperature=0, logprobs=8)
    )
    result = sample(table, torch.tensor([LOGITS] * 2), [0, 1], 7)
    assert result.logprobs[0].top == () and result.logprobs[0].rank == 1
    assert len(result.logprobs[1].top) == 8


def logprobs_of(logits: Tensor, token_ids: Tensor, top: int) -> list[TokenLogprobs]:
    return to_host([tensor.numpy() for tensor in score(logits, token_ids, top).tensors])


def test_logprobs_of_given_tokens() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.tensor([0, 29, 7, 7, 3])
    expected = logits.float().log_softmax(-1)
    for row, found in enumerate(logprobs_of(logits, targets, 40)):
        own = expected[row, targets[row]].item()
        assert found.token_id == int(targets[row])
        assert found.logprob == pytest.approx(own)
        assert found.rank == 1 + sum(p > own for p in expected[row].tolist())
        assert sorted(token for token, _ in found.top) == list(range(30))
        assert sum(math.exp(p) for _, p in found.top) == pytest.approx(1.0, abs=1e-5)


def test_of_many_equal_tokens_only_the_reported_ones_are_listed() -> None:
    """A flat distribution over a large vocabulary must not become a long list."""
    logits = torch.zeros(2, 50)
    logits[0, 7], logits[0, 30:] = 2.0, 1.0
    first, second = logprobs_of(logits, torch.tensor([9, 9]), 3)
    assert [token for token, _ in first.top] == [7, 30, 31] and first.rank == 22
    assert [token for token, _ in second.top] == [0, 1, 2] and second.rank == 1


@pytest.mark.parametrize("vocab", [64, 129, 1000])
@pytest.mark.parametrize("values", [1, 2, 50])
def test_the_reported_tokens_are_the_most_likely_ones(vocab: int, values: int) -> None:
    """Also if many are equally likely, and whatever the size of the vocabulary."""
    dice = torch.Generator().manual_seed(vocab)
    logits = torch.randint(values, (4, vocab), generator=dice).float()
    logits[:2] = logits[:2].where(logits[:2] > 0, -torch.inf)
    logits[:, 3] = values
    for row, found in enumerate(logprobs_of(logits, torch.full((4,), 3), 5)):
        order = sorted(range(vocab), key=lambda i: (-logits[row, i].item(), i))
        assert [token for token, _ in found.top] == order[:5]

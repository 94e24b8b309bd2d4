"""The agreement of masks with single steps, checked on whole grammars."""

from __future__ import annotations

import random

import numpy as np

from deepinfer.grammar.compiled import CompiledGrammar
from deepinfer.grammar.matcher import GrammarMatcher


def bits(row) -> set[int]:
    words = np.ascontiguousarray(row)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def mask(matcher: GrammarMatcher) -> set[int]:
    row = np.full(matcher.compiled.vocab.num_words, -1, dtype=np.int32)
    matcher.fill_bitmask(row)
    return bits(row)


def taken(matcher: GrammarMatcher) -> set[int]:
    """Ids that a fork accepts, tried one by one; the fork must be where it was behind each that it refuses."""
    out = set()
    fork = matcher.fork()
    for token in range(matcher.compiled.vocab.vocab_size + 2):
        if fork.accept_token(token):
            out.add(token)
            fork.rollback(1)
        assert fork.state == matcher.state
        assert fork.num_tokens == matcher.num_tokens
    return out


def check_invariant(grammar, vocab, *, max_states: int = 60, seed: int = 0, **options) -> int:
    """Explores states breadth first by tokens; checks mask == accept, rollback and fork in each.

    Returns the number of states seen.
    """
    compiled = CompiledGrammar(grammar, vocab, max_cache_bytes=4096, **options)
    rng = random.Random(seed)
    first = GrammarMatcher(compiled)
    queue, seen = [first], {first.state}
    checked = 0
    while queue and checked < max_states:
        matcher = queue.pop(rng.randrange(len(queue)))
        checked += 1
        allowed = mask(matcher)
        assert allowed == taken(matcher)
        assert all(matcher.allowed(t) == (t in allowed) for t in range(0, vocab.vocab_size, 3))
        # Other ways to the same place give the same mask.
        fork = matcher.fork()
        steps = 0
        while steps < 4:
            choice = sorted(mask(fork))
            if not choice:
                break
            assert fork.accept_token(rng.choice(choice))
            steps += 1
        fork.rollback(steps)
        assert mask(fork) == allowed
        assert fork.is_terminated() == matcher.is_terminated()
        assert fork.is_accepting() == matcher.is_accepting()
        for token in rng.sample(sorted(allowed), len(allowed)):
            after = matcher.fork()
            assert after.accept_token(token)
            if after.state not in seen:
                seen.add(after.state)
                queue.append(after)
    return checked


def brute_mask(automaton, vocab, state: int) -> set[int]:
    """Ids whose bytes are live from a state, byte by byte."""
    out = set()
    for token in range(vocab.num_tokens):
        text = vocab.token_bytes(token)
        if not text or token in vocab.special_ids:
            continue
        at = state
        for byte in text:
            at = automaton.step(at, byte)
            if not at:
                break
        if at:
            out.add(token)
    return out

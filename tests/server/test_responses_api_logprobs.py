"""Which tokens a message's text came from, however tokens, text and deltas are cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from miniinfer.server.responses_logprobs import TextLogprobs

from .fake import FakeLogprob


def entries(tokens: list[bytes]) -> list[FakeLogprob]:
    return [
        FakeLogprob(number, token.decode(errors="replace"), token, -float(number))
        for number, token in enumerate(tokens)
    ]


def cut(raw: bytes, cuts: list[int]) -> list[bytes]:
    bounds = sorted({min(each, len(raw)) for each in cuts} | {0, len(raw)})
    return [raw[a:b] for a, b in pairwise(bounds)]


CUTS = st.lists(st.integers(0, 40), max_size=8)


@given(st.text(min_size=1, max_size=12), CUTS, CUTS, CUTS)
def test_every_token_of_plain_text_comes_once(
    text: str, token_cuts: list[int], text_cuts: list[int], lag: list[int]
) -> None:
    tokens = entries(cut(text.encode(), token_cuts))
    pieces = [text[a:b] for a, b in pairs(text_cuts, len(text))]
    found = TextLogprobs(0)
    taken = []
    # Text never comes before its tokens; how far these are ahead varies.
    given_tokens = 0
    written = 0
    for position, piece in enumerate(pieces):
        written += len(piece.encode())
        needed = next(
            n for n in range(len(tokens) + 1) if sum(len(t.bytes) for t in tokens[:n]) >= written
        )
        ahead = lag[position % len(lag)] if lag else 0
        upto = max(given_tokens, min(len(tokens), needed + ahead))
        found.add(tokens[given_tokens:upto])
        given_tokens = upto
        taken += found.take(piece)
    assert [entry.logprob for entry in taken] == [token.logprob for token in tokens]


def pairs(cuts: list[int], length: int) -> list[tuple[int, int]]:
    bounds = sorted({min(each, length) for each in cuts} | {0, length})
    return list(pairwise(bounds))


def logprobs(found: TextLogprobs, text: str) -> list[float]:
    return [-entry.logprob for entry in found.take(text)]


def test_tokens_of_marks_and_reasoning_are_left_out():
    found = TextLogprobs(0)
    found.add(entries([b"<think>", b"so", b" hi", b"</think>", b"\n", b"h", b"i", b"<end>"]))
    found.skip("so hi")
    assert logprobs(found, "hi") == [5, 6]


def test_a_token_that_two_pieces_share_is_in_the_first():
    found = TextLogprobs(0)
    found.add(entries([b"a", b"bc", b"d"]))
    assert logprobs(found, "ab") == [0, 1]
    assert logprobs(found, "cd") == [2]


def test_text_that_no_token_spells_takes_all():
    found = TextLogprobs(0)
    found.add(entries([b"\xff", b"\xfe", b"a"]))
    assert logprobs(found, "��a") == [0, 1, 2]
    found.add(entries([b"b"]))
    assert logprobs(found, "b") == [0]


def test_arguments_that_were_rewritten_leave_the_tokens_waiting():
    found = TextLogprobs(0)
    found.add(entries([b"[f(a=1)]", b"then"]))
    found.skip('{"a": 1}')
    assert logprobs(found, "then") == [1]


def test_the_number_of_alternatives_is_limited():
    found = TextLogprobs(1)
    top = [(1, "a", b"a", -0.5), (2, "b", b"b", -1.5)]
    found.add([FakeLogprob(1, "a", b"a", -0.5, 1, top)])
    [entry] = found.take("a")
    assert [each.token for each in entry.top_logprobs] == ["a"]


def test_a_delta_without_logprobs_adds_nothing():
    found = TextLogprobs(0)
    found.add(None)
    assert found.take("a") == []

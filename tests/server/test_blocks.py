"""Parts of an answer as blocks, however they are cut into deltas."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from miniinfer.parsing import Part
from miniinfer.server.blocks import Block, BlockReader, reasoning_tokens

TEXT = st.text("ab \n", max_size=4)


@st.composite
def answers(draw: st.DrawFn) -> list[Part]:
    """Parts as a parser may give them: a call's arguments follow its name."""
    parts: list[Part] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "content", "tool_call"]), max_size=6)):
        if kind == "tool_call":
            parts.append(("tool_call", calls, f"f{calls}"))
            pieces = draw(st.lists(st.text("{}1", max_size=3), max_size=3))
            parts += [("arguments", calls, piece) for piece in pieces]
            calls += 1
        else:
            parts.append((kind, draw(TEXT)))
    return parts


def read(parts: list[Part], cuts: list[int]) -> BlockReader:
    """Read parts in deltas, and check the events against the blocks."""
    reader = BlockReader()
    events = []
    for start, end in zip([0, *cuts], [*cuts, len(parts)], strict=True):
        events += reader.read(parts[start:end])
    events += reader.finish()
    texts: dict[int, str] = {}
    is_open = None
    for event in events:
        index = event[1].index
        if event[0] == "open":
            assert is_open is None
            assert index == len(texts)
            texts[index], is_open = "", index
        elif event[0] == "append":
            assert index == is_open
            assert event[2]
            texts[index] += event[2]
        else:
            assert index == is_open
            is_open = None
    assert is_open is None
    assert texts == {block.index: block.text for block in reader.blocks}
    return reader


def shown(reader: BlockReader) -> list[tuple[str, str, str]]:
    return [(block.kind, block.name, block.text) for block in reader.blocks]


@given(answers(), st.data())
def test_blocks_do_not_depend_on_the_deltas(parts: list[Part], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(parts)), max_size=4)))
    assert shown(read(parts, cuts)) == shown(read(parts, []))


@given(answers())
def test_nothing_but_white_space_is_lost(parts: list[Part]) -> None:
    blocks = shown(read(parts, []))
    for kind in ("reasoning", "content"):
        said = "".join(part[1] for part in parts if part[0] == kind)
        kept = "".join(text for block, _, text in blocks if block == kind)
        assert kept.split() == said.split() or "".join(kept.split()) == "".join(said.split())
    calls = [name for block, name, _ in blocks if block == "tool_call"]
    assert calls == [part[2] for part in parts if part[0] == "tool_call"]
    arguments = "".join(text for block, _, text in blocks if block == "tool_call")
    assert arguments == "".join(part[2] for part in parts if part[0] == "arguments")


@given(answers())
def test_only_a_blank_answer_has_a_blank_block(parts: list[Part]) -> None:
    blocks = shown(read(parts, []))
    blank = [kind for kind, _, text in blocks if kind != "tool_call" and not text.strip()]
    assert not blank or blocks == [("content", "", blocks[0][2])]


@given(answers())
def test_a_plain_answer_keeps_its_white_space(parts: list[Part]) -> None:
    plain = [("content", part[1]) for part in parts if part[0] == "content" and part[1]]
    text = "".join(part[1] for part in plain)
    assert shown(read(plain, [])) == ([("content", "", text)] if text else [])


def test_the_share_of_reasoning():
    blocks = [
        Block(0, "reasoning", pieces=["a" * 30]),
        Block(1, "content", pieces=["b" * 60, "c" * 6]),
        Block(2, "tool_call", "f", ["{1}"]),
    ]
    assert reasoning_tokens(blocks, 20) == 6
    assert reasoning_tokens(blocks[:1], 20) == 20
    assert reasoning_tokens(blocks[1:], 20) == 0
    assert reasoning_tokens([], 20) == 0

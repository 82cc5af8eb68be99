"""A scheduler of the core's semantics in plain Python: what the compiled core is measured against.

Continuous batching, chunked prefill, paged blocks with reference counts, a prefix cache by chained
hashes whose tokens are compared on a hit, least-recently-used eviction, preemption by recompute.
Lists, dicts and deques throughout, as Python engines write it; a step's inputs end up in numpy
arrays. It leaves out what the core also does: tenants, priorities, pauses, statistics, text.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

__all__ = ["PythonScheduler", "Sequence"]

BlockKey: TypeAlias = "tuple[int, tuple[int, ...]]"


@dataclass(slots=True, eq=False)
class Sequence:
    """A live request. The KV of the first `computed` of `tokens` is in the blocks of `blocks`."""

    id: int
    tokens: list[int]
    prompt_len: int
    max_len: int
    temperature: float
    top_p: float
    computed: int = 0
    scheduled: int = 0
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    registered: int = 0
    chain: int = 0
    written: int = 0


class PythonScheduler:
    """Plans steps for a model: `plan`, a forward pass, `commit`."""

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_id: int = -1,
    ) -> None:
        self.block_size = block_size
        self.budget = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_id = eos_token_id
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.running: dict[int, Sequence] = {}
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        # Free blocks, the next to hand out first; cached ones join at the end.
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.references = [0] * num_blocks
        self.cached: dict[int, tuple[int, BlockKey]] = {}
        self.keys: dict[int, int] = {}
        self.planned: list[Sequence] = []
        self.finished: list[tuple[int, str]] = []
        self.next_id = 0
        width = -(-max_model_len // block_size)
        self.block_table = np.zeros((max_num_seqs, width), dtype=np.int32)
        self.arrays = {
            name: np.zeros(length, dtype=dtype)
            for name, dtype, length in (
                ("token_ids", np.int32, max_num_batched_tokens),
                ("positions", np.int32, max_num_batched_tokens),
                ("slot_mapping", np.int64, max_num_batched_tokens),
                ("query_start", np.int32, max_num_seqs + 1),
                ("seq_lens", np.int32, max_num_seqs),
                ("rows", np.int32, max_num_seqs),
                ("logits_index", np.int32, max_num_seqs),
                ("temperature", np.float32, max_num_seqs),
                ("top_p", np.float32, max_num_seqs),
            )
        }

    def submit(
        self, prompt: list[int], *, max_tokens: int, temperature: float = 0.0, top_p: float = 1.0
    ) -> int:
        """Queue a prompt and return the request's id."""
        if not 0 < len(prompt) < self.max_model_len:
            raise ValueError(
                f"prompt must have 1 to {self.max_model_len - 1} tokens, got {len(prompt)}"
            )
        self.next_id += 1
        max_len = min(len(prompt) + max_tokens, self.max_model_len)
        self.waiting[self.next_id] = Sequence(
            self.next_id, list(prompt), len(prompt), max_len, temperature, top_p
        )
        return self.next_id

    def cancel(self, request_id: int) -> None:
        """End a request in whatever state it is; unknown ids are ignored."""
        sequence = self.waiting.pop(request_id, None)
        if sequence is None:
            sequence = self.running.pop(request_id, None)
            if sequence is None:
                return
            self._give_up(sequence)
        self.finished.append((request_id, "abort"))

    def plan(self) -> int:
        """Decide the next step and fill the arrays. Return its tokens; 0 if there is nothing."""
        planned: list[Sequence] = []
        budget = self.budget
        prefilling: list[Sequence] = []
        for sequence in list(self.running.values()):
            if sequence.row < 0:
                continue
            if len(sequence.tokens) - sequence.computed > 1:
                prefilling.append(sequence)
            elif self._make_room(sequence):
                sequence.scheduled = 1
                budget -= 1
                planned.append(sequence)
        planned = [sequence for sequence in planned if sequence.row >= 0]
        for sequence in prefilling:
            if budget == 0:
                break
            if sequence.row >= 0:
                budget -= self._give(sequence, budget, planned)
        while self.waiting and budget > 0 and self.free_rows:
            sequence = next(iter(self.waiting.values()))
            if not self._admit(sequence):
                break
            budget -= self._give(sequence, budget, planned)
        self.planned = planned
        return self._fill(planned)

    def commit(self, sampled: list[int]) -> list[tuple[int, int]]:
        """Take in a token for each request that has its last one computed; return them by id."""
        output: list[tuple[int, int]] = []
        at = 0
        for sequence in self.planned:
            sequence.computed += sequence.scheduled
            sequence.scheduled = 0
            tokens = sequence.tokens
            last = sequence.computed == len(tokens)
            if last:
                token = sampled[at]
                at += 1
                tokens.append(token)
                output.append((sequence.id, token))
            self._register(sequence)
            if last and (token == self.eos_token_id or len(tokens) >= sequence.max_len):
                del self.running[sequence.id]
                self._give_up(sequence)
                reason = "stop" if token == self.eos_token_id else "length"
                self.finished.append((sequence.id, reason))
        return output

    def _give(self, sequence: Sequence, budget: int, planned: list[Sequence]) -> int:
        given = min(budget, len(sequence.tokens) - sequence.computed)
        sequence.scheduled = given
        planned.append(sequence)
        return given

    def _make_room(self, sequence: Sequence) -> bool:
        """Have a block for the next token, preempting the latest; False if that is itself."""
        if len(sequence.blocks) * self.block_size >= len(sequence.tokens):
            return True
        while not self.free_blocks:
            victim = next(reversed(self.running.values()))
            del self.running[victim.id]
            self._give_up(victim)
            self.waiting[victim.id] = victim
            self.waiting.move_to_end(victim.id, last=False)
            if victim is sequence:
                return False
        sequence.blocks.append(self._allocate())
        return True

    def _allocate(self) -> int:
        block, _ = self.free_blocks.popitem(last=False)
        key = self.keys.pop(block, None)
        if key is not None:
            del self.cached[key]
        self.references[block] = 1
        return block

    def _admit(self, sequence: Sequence) -> bool:
        size, tokens = self.block_size, sequence.tokens
        hits: list[int] = []
        chain = 0
        free_hits = 0
        for start in range(0, (len(tokens) - 1) // size * size, size):
            content = tuple(tokens[start : start + size])
            found = self.cached.get(hash((chain, content)))
            if found is None or found[1] != (chain, content):
                break
            hits.append(found[0])
            free_hits += self.references[found[0]] == 0
            chain = hash((chain, content))
        missing = -(-len(tokens) // size) - len(hits)
        # One more for each running request, so that the newcomer is not preempted at once.
        if missing + free_hits + len(self.running) > len(self.free_blocks) and self.running:
            return False
        for block in hits:
            if self.references[block] == 0:
                del self.free_blocks[block]
            self.references[block] += 1
        sequence.blocks = hits
        hits.extend(self._allocate() for _ in range(missing))
        sequence.registered = len(hits) - missing
        sequence.computed = sequence.registered * size
        sequence.chain = chain
        sequence.written = 0
        sequence.row = self.free_rows.pop()
        del self.waiting[sequence.id]
        self.running[sequence.id] = sequence
        return True

    def _register(self, sequence: Sequence) -> None:
        """Make each block that became full findable."""
        size = self.block_size
        while (sequence.registered + 1) * size <= sequence.computed:
            at = sequence.registered
            content = tuple(sequence.tokens[at * size : (at + 1) * size])
            key = hash((sequence.chain, content))
            block = sequence.blocks[at]
            if key not in self.cached and block not in self.keys:
                self.cached[key] = (block, (sequence.chain, content))
                self.keys[block] = key
            sequence.chain = key
            sequence.registered += 1

    def _give_up(self, sequence: Sequence) -> None:
        """Take row and blocks from a request; the tail of its chain is evicted first."""
        for block in reversed(sequence.blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free_blocks[block] = None
                if block not in self.keys:
                    self.free_blocks.move_to_end(block, last=False)
        sequence.blocks = []
        sequence.computed = sequence.scheduled = sequence.registered = 0
        self.free_rows.append(sequence.row)
        sequence.row = -1

    def _fill(self, planned: list[Sequence]) -> int:
        size = self.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_start = [0]
        seq_lens: list[int] = []
        rows: list[int] = []
        logits_index: list[int] = []
        temperature: list[float] = []
        top_p: list[float] = []
        for sequence in planned:
            start, end = sequence.computed, sequence.computed + sequence.scheduled
            blocks = sequence.blocks
            if end - start == 1:
                token_ids.append(sequence.tokens[start])
                positions.append(start)
                slots.append(blocks[start // size] * size + start % size)
            else:
                token_ids.extend(sequence.tokens[start:end])
                positions.extend(range(start, end))
                slots.extend(blocks[at // size] * size + at % size for at in range(start, end))
            query_start.append(len(token_ids))
            seq_lens.append(end)
            rows.append(sequence.row)
            if sequence.written < len(blocks):
                fresh = blocks[sequence.written :]
                self.block_table[sequence.row, sequence.written : len(blocks)] = fresh
                sequence.written = len(blocks)
            if end == len(sequence.tokens):
                logits_index.append(len(token_ids) - 1)
                temperature.append(sequence.temperature)
                top_p.append(sequence.top_p)
        for name, values in (
            ("token_ids", token_ids),
            ("positions", positions),
            ("slot_mapping", slots),
            ("query_start", query_start),
            ("seq_lens", seq_lens),
            ("rows", rows),
            ("logits_index", logits_index),
            ("temperature", temperature),
            ("top_p", top_p),
        ):
            self.arrays[name][: len(values)] = values
        return len(token_ids)

"""Measures what text costs: `make bench-text`.

* A token's way from the sampler to the bytes of its event: detokenised, matched against stop
  strings, written as a chunk of a chat. One thread does all of it here, the step's commit too.
* What a JSON schema on every row adds to a decode step of the built-in model.

Writes `benches/results/text.json` and the table in `benches/README.md`.
"""

import statistics
import time
from pathlib import Path

import report
from structured import measure

from miniinfer.bench.fake_model import FakeModel
from miniinfer.fetch import ensure_builtin
from miniinfer.sampling_params import SamplingParams
from miniinfer.server.chat_parts import PartRules
from miniinfer.server.chat_prepare import PreparedChat
from miniinfer.server.chat_writer import ChatWriter
from miniinfer.server.envelope import Envelope
from miniinfer.server.generation import Work
from miniinfer.server.protocol import ChatMessage, ChatRequest
from miniinfer.tokenizer import Tokenizer

HERE = Path(__file__).parent
STREAMS = 64
TOKENS = 400
ROUNDS = 9
ROWS = {
    "us_per_token": ("sampler to event bytes, microseconds a token", "<= 2"),
    "step_ms_8": ("decode step of 8 rows, milliseconds", ""),
    "masked_step_ms_8": ("the same under a JSON schema", ""),
    "mask_added_step_percent_8": ("added by the schema, percent", "<= 5"),
}
STOP = ["\n\nUser:", "</answer>", "###"]


class _Source:
    """What a writer asks of the request behind it."""

    num_choices = 1


def writer() -> ChatWriter:
    body = ChatRequest(messages=[ChatMessage(role="user", content="Hello")], stream=True)
    work = Work(token_ids=[1], params=SamplingParams())
    prepared = PreparedChat(work=work, rules=PartRules(), top_logprobs=0)
    envelope = Envelope(id="chatcmpl-0123456789abcdef", model="SmolLM2-135M-Instruct")
    return ChatWriter(envelope, _Source(), prepared, body)


def one_round(tokenizer: Tokenizer, script: list[int]) -> tuple[float, int]:
    """CPU seconds between the sampler and the socket, and the bytes that came of them."""
    model = FakeModel(
        script,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.json(),
        max_num_seqs=STREAMS,
        text_thread=False,
    )
    writers = {}
    submissions = []
    for number in range(STREAMS):
        # Prompts of different lengths, so that the streams are at different places of the text.
        prompt = script[: 1 + 7 * number]
        submissions.append(model.submit(prompt, max_tokens=TOKENS, stop=STOP))
        writers[submissions[-1].ids()[0]] = writer()
    spent, size = 0.0, 0
    while model.core.has_requests():
        model.plan()
        model.sample()
        started = time.process_time()
        model.commit()
        for choice, delta in model.drain():
            size += len(writers[choice].delta(0, delta))
        spent += time.process_time() - started
    return spent, size


def text_cost() -> float:
    """Median microseconds a token."""
    tokenizer = Tokenizer.from_gguf(ensure_builtin(progress=False))
    text = (HERE.parent / "DESIGN.md").read_text()
    script = tokenizer.encode(text)
    costs = []
    for _ in range(ROUNDS):
        spent, size = one_round(tokenizer, script)
        assert size > STREAMS * TOKENS * 100, "each token has an event"
        costs.append(spent * 1e6 / (STREAMS * TOKENS))
    return statistics.median(costs)


def main() -> None:
    figures = {"us_per_token": round(text_cost(), 3), **measure(rows=8)}
    lines = ["| figure | must be | measured |", "|---|---|---|"]
    for name, (title, target) in ROWS.items():
        lines.append(f"| {title} | {target} | {figures[name]:.3g} |")
    table = "\n".join(lines)
    print(table)
    report.write("text", figures, table)


if __name__ == "__main__":
    main()

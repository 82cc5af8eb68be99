"""What answers of a given form cost: the time of a decode step with and without a JSON schema.

Both kinds of step come from one engine over the built-in model, in turns, all rows of a step with
the same schema or none of them. `text.py` reports it.
"""

import statistics
import time

from miniinfer import EngineArgs, LLMEngine, SamplingParams, StructuredOutputsParams

PROMPT = "A list of people, as JSON:\n"
# An answer that goes on for as long as it is asked to.
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "job": {"enum": ["baker", "smith", "weaver", "potter"]},
            "notes": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
        "required": ["name", "age", "job"],
        "additionalProperties": False,
    },
}


def decode_times(engine: LLMEngine, rows: int, steps: int, params: SamplingParams) -> list[float]:
    """Seconds of each of `steps` steps in which all rows decode."""
    names = [engine.add_request(None, PROMPT, params) for _ in range(rows)]
    for _ in range(4):  # the prompts, and what is done once
        engine.step()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    assert all(not engine.is_finished(name) for name in names)
    for name in names:
        engine.discard_request(name)
    while engine.engine.core.has_requests():
        engine.step()
    return times


def measure(rows: int = 8, rounds: int = 10, steps: int = 20) -> dict[str, float]:
    """Median milliseconds of a decode step with and without a schema on all rows, in turns."""
    engine = LLMEngine(EngineArgs(seed=0, max_num_seqs=rows))
    grammar = engine.engine.compile_grammar(StructuredOutputsParams(json=SCHEMA))
    plain = SamplingParams(temperature=1, max_tokens=500, ignore_eos=True)
    bound = SamplingParams(temperature=1, max_tokens=500, structured_outputs=grammar)
    without: list[float] = []
    within: list[float] = []
    for _ in range(rounds):
        without += decode_times(engine, rows, steps, plain)
        within += decode_times(engine, rows, steps, bound)
    base, masked = statistics.median(without), statistics.median(within)
    return {
        f"step_ms_{rows}": round(base * 1e3, 3),
        f"masked_step_ms_{rows}": round(masked * 1e3, 3),
        f"mask_added_step_percent_{rows}": round((masked / base - 1) * 100, 2),
    }

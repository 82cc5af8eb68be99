"""Times the sampler: microseconds per step for a batch of rows, for usual mixes of parameters.

Run `python benches/sampling.py --rows 8 --vocab 49152`. Probabilities fall with a power of the
rank, as a language model's roughly do; `--power` makes the distribution sharper or flatter.
"""

import argparse
import statistics
import time

import torch

from miniinfer.sampling import SamplingBatch, sample

CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "temperature 2, top_p 0.99": {"temperature": 2.0, "top_p": 0.99},
    "greedy, 20 logprobs": {"temperature": 0.0, "num_logprobs": 20},
}


def make_batch(rows: int, case: dict[str, float]) -> SamplingBatch:
    def column(name: str, default: float) -> torch.Tensor:
        return torch.full((rows,), case.get(name, default))

    return SamplingBatch(
        temperature=column("temperature", 1.0),
        top_k=column("top_k", 0).int(),
        top_p=column("top_p", 1.0),
        min_p=column("min_p", 0.0),
        uniform=torch.rand(rows),
        all_greedy=case.get("temperature") == 0,
        any_top_k="top_k" in case,
        any_top_p="top_p" in case,
        any_min_p="min_p" in case,
        edit_sample=torch.empty(0, dtype=torch.int32),
        edit_token=torch.empty(0, dtype=torch.int32),
        edit_repetition=torch.empty(0),
        edit_bias=torch.empty(0),
        num_logprobs=int(case.get("num_logprobs", -1)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--power", type=float, default=1.5)
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    ranks = torch.rand(arguments.rows, arguments.vocab).argsort(-1) + 1
    logits = -arguments.power * ranks.log()
    print(f"{arguments.rows} rows, {arguments.vocab} tokens, {arguments.threads} threads")
    for name, case in CASES.items():
        batch = make_batch(arguments.rows, case)
        times = []
        for _ in range(arguments.repeat + 3):
            batch.uniform.uniform_()
            start = time.perf_counter()
            sample(logits, batch)
            times.append((time.perf_counter() - start) * 1e6)
        times = sorted(times[3:])
        print(f"{name:28} median {statistics.median(times):8.0f} us   least {times[0]:8.0f} us")


if __name__ == "__main__":
    main()

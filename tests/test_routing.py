"""Which engine gets a prompt."""

import random

import pytest

from miniinfer.routing import Router


def test_a_prompt_goes_where_its_prefix_went() -> None:
    router = Router()
    system = list(range(200))
    assert router.choose(system, None, [5.0, 0.0, 5.0]) == 1
    # Others are as free now, and one is freer.
    assert router.choose([*system, 7, 8, 9], None, [0.0, 100.0, 50.0]) == 1
    assert router.choose([9, *system], None, [0.0, 100.0, 50.0]) == 0
    # A salt keeps caches apart, so it keeps prompts apart.
    assert router.choose(system, "salt", [0.0, 100.0, 50.0]) == 0


def test_a_prefix_is_not_worth_any_load() -> None:
    router = Router()
    prompt = list(range(300))
    assert router.choose(prompt, None, [0.0, 1.0]) == 0
    assert router.choose(prompt, None, [600.0, 200.0]) == 0
    assert router.choose(prompt, None, [5000.0, 200.0]) == 1
    assert router.choose(prompt, None, [0.0, 200.0]) == 1, "it has moved"


def test_short_prompts_and_lost_engines() -> None:
    router = Router()
    assert router.choose([1, 2, 3], None, [3.0, 2.0, 4.0]) == 1
    prompt = list(range(300))
    assert router.choose(prompt, None, [3.0, 2.0, 1.0]) == 2
    assert router.choose(prompt, None, [3.0, 2.0, None]) == 1
    router.forget(1)
    assert router.choose(prompt, None, [0.0, 2.0, 9.0]) == 0
    with pytest.raises(ValueError, match="at least one engine"):
        router.choose(prompt, None, [None, None])


def test_memory_is_bounded_and_the_oldest_go() -> None:
    router = Router(capacity=50)
    draw = random.Random(1)
    kept = [draw.randrange(1000) for _ in range(128)]
    for _ in range(200):
        router.choose([draw.randrange(1000) for _ in range(64 * 5)], None, [0.0, 0.0])
        router.choose(kept, None, [0.0, 0.0])
        assert len(router) <= 50
    assert router.choose(kept, None, [9.0, 0.0]) == 0
    # A prompt of any length is looked at in part only.
    router.choose(range(10**6), None, [0.0])
    assert len(router) <= 50
    with pytest.raises(ValueError, match="capacity"):
        Router(0)

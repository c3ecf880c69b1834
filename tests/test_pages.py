"""Pages that rows share: texts that begin alike are read once, and every answer stays what it is alone."""

import numpy as np
import pytest

import test_engine
import test_scheduler

folder = test_engine.folder

PAGE = 16
"""Tokens of a page in these engines: 8 slots on each of 2 devices."""


@pytest.fixture(params=[1])
def engine(folder, mesh, monkeypatch, request):
    """Four rows, in `request.param` groups."""
    from treering.infer import chunks
    from treering.infer import engine as module

    monkeypatch.setattr(module, "PAGE_SLOTS", PAGE // 2)
    monkeypatch.setattr(chunks, "PREFILL_CHUNKS", (2, 8, 64))
    return test_engine.make_engine(folder, mesh, {"data": request.param, "context": 2}, batch=4, capacity=64)


@pytest.fixture
def appended(engine):
    """Tokens of each chunk that the engine appends."""
    with test_engine.counted(engine) as counts:
        yield counts


def answers(scheduler, requests):
    """Tokens of each request (a prompt, a config, a caller), all submitted at once."""
    numbers = [scheduler.submit(prompt, config, caller=caller) for prompt, config, caller in requests]
    made = {number: [] for number in numbers}
    for event in scheduler.run():
        if event.token is not None:
            made[event.request].append(event.token)
    return [made[number] for number in numbers]


def sampled(seed, new=6):
    from treering.configs.sampling import RequestConfig, SamplingConfig

    return RequestConfig(max_new_tokens=new, sampling=SamplingConfig(temperature=1.0, seed=seed))


@pytest.mark.parametrize("engine", [1, 2], indirect=True, ids=["one group", "two groups"])
def test_samples_of_one_prompt_read_its_pages_once(engine, appended):
    from treering.infer.scheduler import Scheduler

    (prompt,) = test_engine.token_rows(1, 40, seed=1)
    wanted = [(prompt, sampled(seed), "") for seed in range(4)]
    alone = [answers(Scheduler(engine), [request])[0] for request in wanted]
    assert len({tuple(tokens) for tokens in alone}) == 4
    appended.clear()
    scheduler = Scheduler(engine)
    assert answers(scheduler, wanted) == alone
    # Two whole pages by reference, a copy of the third, and the last token for its logits; groups side by side.
    assert appended == ([40, 1, 1, 1] if engine.groups == 1 else [80, 2])
    assert all(scheduler.pages.free(group) == engine.group_pages for group in range(engine.groups))


def test_a_later_turn_reads_what_is_new_and_other_callers_read_all(engine, appended):
    from treering.infer.scheduler import Scheduler

    (prompt,) = test_engine.token_rows(1, 30, seed=2)
    scheduler = Scheduler(engine)
    (said,) = answers(scheduler, [(prompt, sampled(0, new=8), "one")])
    longer = [*prompt, *said, 1, 2, 3]
    (expected,) = answers(Scheduler(engine), [(longer, sampled(1), "")])
    for caller, read in (("one", len(longer) - 2 * PAGE), ("two", len(longer)), ("two", len(longer) - 2 * PAGE)):
        appended.clear()
        assert answers(scheduler, [(longer, sampled(1), caller)]) == [expected]
        assert appended == [read], caller


def test_a_prompt_of_whole_pages_still_reads_its_last(engine, appended):
    from treering.infer.scheduler import Scheduler

    (prompt,) = test_engine.token_rows(1, 2 * PAGE, seed=3)
    scheduler = Scheduler(engine)
    first = answers(scheduler, [(prompt, sampled(0), "")])
    assert answers(scheduler, [(prompt, sampled(0), "")]) == first
    assert appended == [2 * PAGE, PAGE]


def test_texts_that_begin_alike_in_a_pool_too_small_for_them(folder, mesh, engine):
    """Pages are forgotten when others need them; every answer is that of the request alone."""
    from treering.infer.scheduler import Scheduler

    beginnings = test_engine.token_rows(3, 48, seed=4)
    rng = np.random.default_rng(5)
    wanted = []
    for number in range(24):
        prompt = [*beginnings[number % 3][: rng.integers(10, 48)], *rng.integers(0, 96, rng.integers(0, 6)).tolist()]
        wanted.append((prompt, sampled(number, new=int(rng.integers(1, 8))), frozenset()))
    single = test_engine.make_engine(folder, mesh, {"context": 1}, batch=1, capacity=64)
    alone = Scheduler(single)
    expected = [test_scheduler.answers(alone, [request])[0][0] for request in wanted]
    engine.group_pages = 9
    scheduler = Scheduler(engine)
    made, reasons = test_scheduler.answers(scheduler, wanted, cancel=lambda index, step: rng.random() < 0.01)
    for index, tokens in enumerate(expected):
        assert made[index] == tokens[: len(made[index])]
        assert reasons[index] == "cancelled" or len(made[index]) == len(tokens)
    assert scheduler.pages.free(0) == 9


def test_pages_count_their_rows():
    from treering.infer.pages import Pages, page_keys

    keys = page_keys("", list(range(10)), 4)
    assert len(keys) == 2 and keys != page_keys("other", list(range(10)), 4)
    assert page_keys("", [*range(4), 9, 9, 9, 9], 4)[0] == keys[0] != keys[1]
    pages = Pages(1, 3)
    first = pages.take(0, 2)
    pages.remember(0, keys, first)
    assert pages.find(0, keys) == first and pages.find(0, keys[1:]) == first[1:] and pages.find(0, [b""]) == []
    assert pages.fits(0, first, 3) and not pages.fits(0, first, 4)
    pages.share(0, first)
    pages.give_back(0, first)
    assert pages.free(0) == 1, "another row holds them"
    pages.give_back(0, first)
    assert pages.free(0) == 3 and pages.find(0, keys) == first
    # Idle pages that are shared are not free for others.
    assert pages.fits(0, first, 3) and not pages.fits(0, first, 4)
    # The end of the text goes first.
    assert pages.take(0, 2)[1] == first[1] and pages.find(0, keys) == first[:1]

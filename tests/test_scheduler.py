"""Continuous batching: every answer equals the one its request gets alone, whatever runs next to it."""

import numpy as np
import pytest

import test_engine
import tiny

oracle = test_engine.oracle


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from treering.models.conversion.convert import convert

    source = tiny.write_folder(tmp_path_factory.mktemp("tiny") / "hf")
    convert(source, source.parent / "checkpoint")
    return source.parent / "checkpoint"


def requests(count, seed=0):
    """Prompts, configs and end tokens of all kinds: greedy, sampled, penalised, short, long, stopped early."""
    from treering.configs.sampling import RequestConfig, SamplingConfig

    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        prompt = rng.integers(0, 96, rng.integers(1, 40)).tolist()
        sampling = [
            SamplingConfig(),
            SamplingConfig(temperature=0.8, seed=number),
            SamplingConfig(temperature=1.2, top_p=0.9, repetition_penalty=1.3, seed=number),
        ][number % 3]
        config = RequestConfig(max_new_tokens=int(rng.integers(1, 12)), sampling=sampling)
        made.append((prompt, config, frozenset(rng.integers(0, 96, 8).tolist())))
    return made


def answers(scheduler, wanted, *, cancel=lambda number, step: False):
    """Tokens and finish reason of each request, submitted a few at a time while others run."""
    waiting, running, made, reasons, step = list(enumerate(wanted)), {}, {}, {}, 0
    while waiting or not scheduler.is_idle:
        for _ in range(min(2, len(waiting))):
            index, (prompt, config, ends) = waiting.pop(0)
            running[scheduler.submit(prompt, config, end_ids=ends, streamed=index % 2 == 0)] = index
            made[index] = []
        for number, index in running.items():
            if index not in reasons and cancel(index, step):
                scheduler.cancel(number)
        for event in scheduler.step():
            index = running[event.request]
            assert index not in reasons, "an event after the last one"
            if event.token is not None:
                made[index].append(event.token)
            if event.finish_reason is not None:
                reasons[index] = event.finish_reason
        step += 1
    return made, reasons


@pytest.fixture(scope="module")
def alone(folder, mesh):
    """Each request by itself on one device."""
    from treering.infer.scheduler import Scheduler

    engine = test_engine.make_engine(folder, mesh, {"context": 1}, batch=1, capacity=64)
    wanted = requests(24)
    results = []
    scheduler = Scheduler(engine)
    for request in wanted:
        made, reasons = answers(scheduler, [request])
        results.append((made[0], reasons[0]))
    return wanted, results


LONG_MESHES = [pytest.param(sizes, marks=pytest.mark.long) for sizes in ({"context": 1}, {"context": 4})]


@pytest.mark.parametrize("sizes", [{"data": 2, "context": 2, "tensor": 2}, *LONG_MESHES], ids=str)
def test_answers_are_those_of_each_request_alone(folder, mesh, alone, sizes):
    from treering.infer.scheduler import Scheduler

    wanted, results = alone
    scheduler = Scheduler(test_engine.make_engine(folder, mesh, sizes, batch=4, capacity=64))
    made, reasons = answers(scheduler, wanted)
    for index, (tokens, reason) in enumerate(results):
        assert made[index] == tokens and reasons[index] == reason, index


@pytest.mark.long
def test_random_cancels_leave_others_alone_and_no_page_behind(folder, mesh, alone, monkeypatch):
    """Small pages in a pool too small for all rows at once: requests wait, and all pages come back."""
    from treering.infer import engine as module
    from treering.infer.scheduler import Scheduler

    monkeypatch.setattr(module, "PAGE_SLOTS", 8)
    wanted, results = alone
    engine = test_engine.make_engine(folder, mesh, {"context": 2}, batch=4, capacity=64)
    engine.group_pages = 7
    scheduler = Scheduler(engine)
    free = scheduler.pages.free(0)
    rng = np.random.default_rng(1)
    chosen = set(rng.choice(len(wanted), 8, replace=False).tolist())
    made, reasons = answers(scheduler, wanted, cancel=lambda index, step: index in chosen and rng.random() < 0.3)
    assert scheduler.pages.free(0) == free == 7
    assert any(reasons[index] == "cancelled" for index in chosen)
    for index, (tokens, reason) in enumerate(results):
        if reasons[index] == "cancelled":
            assert index in chosen and made[index] == tokens[: len(made[index])]
        else:
            assert made[index] == tokens and reasons[index] == reason


@pytest.mark.long
def test_two_thousand_requests(folder, mesh):
    """With random cancels: right answers, no page lost, and memory that does not grow."""
    import resource

    from treering.infer.scheduler import Scheduler

    wanted = requests(2000, seed=5)
    single = Scheduler(test_engine.make_engine(folder, mesh, {"context": 1}, batch=1, capacity=64))
    many = Scheduler(test_engine.make_engine(folder, mesh, {"context": 2}, batch=8, capacity=64))
    rng = np.random.default_rng(2)
    peaks = {}
    for start in range(0, 2000, 200):
        part = wanted[start : start + 200]
        made, reasons = answers(many, part, cancel=lambda index, step: rng.random() < 0.01)
        for index, request in enumerate(part):
            tokens, reason = answers(single, [request])
            if reasons[index] == "cancelled":
                assert made[index] == tokens[0][: len(made[index])]
            else:
                assert made[index] == tokens[0] and reasons[index] == reason[0]
        peaks[start] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert many.pages.free(0) == many.engine.group_pages
    assert peaks[1800] - peaks[0] <= 20 * 1024


def test_a_request_that_can_never_fit_is_refused_and_one_that_does_not_fit_now_waits(folder, mesh):
    from treering.configs.sampling import RequestConfig
    from treering.infer.engine import Engine
    from treering.infer.scheduler import Scheduler

    whole = test_engine.make_engine(folder, mesh, {"context": 1}, batch=2, capacity=512)
    engine = Engine(whole.model, whole.plan, whole.precision, batch=2, capacity=512, pages=1)
    scheduler = Scheduler(engine)
    with pytest.raises(ValueError, match="take 3 pages of 128 tokens, and the pool has 1"):
        scheduler.submit([1] * 200, RequestConfig(max_new_tokens=100))
    first = scheduler.submit([1, 2, 3], RequestConfig(max_new_tokens=3))
    second = scheduler.submit([4, 5], RequestConfig(max_new_tokens=3))
    order = [event.request for event in scheduler.run() if event.finish_reason]
    assert order == [first, second] and scheduler.pages.free(0) == 1


def test_logprobs_are_reported_of_the_requests_that_asked(folder, mesh):
    from treering.configs.sampling import RequestConfig, SamplingConfig
    from treering.infer.scheduler import Scheduler

    engine = test_engine.make_engine(folder, mesh, {"context": 2}, batch=2, capacity=64)
    scheduler = Scheduler(engine)
    hot = SamplingConfig(temperature=0.5, top_p=0.5, seed=3)
    asked = scheduler.submit([1, 2, 3], RequestConfig(max_new_tokens=4, logprobs=2, sampling=hot))
    scheduler.submit([4, 5, 6], RequestConfig(max_new_tokens=4))
    events = list(scheduler.run())
    assert all((event.logprob is not None) == (event.request == asked) for event in events)
    tokens = [event.token for event in events if event.request == asked]
    # The first is known before others are drawn, though all are reported after one step: rates are counted from it.
    first, second, *_ = (event.time for event in events if event.request == asked)
    assert first < second
    for step, event in enumerate(event for event in events if event.request == asked):
        logits, _ = engine.append(engine.empty_state(), [[1, 2, 3, *tokens[:step]], []])
        table = np.asarray(logits)[0].astype(np.float64)
        table -= np.log(np.exp(table - table.max()).sum()) + table.max()
        assert event.logprob.logprob == pytest.approx(table[event.token], abs=1e-4)
        assert [token for token, _ in event.logprob.top] == np.argsort(-table)[:2].tolist()


@pytest.mark.parametrize("sizes", [{"context": 1}, {"data": 2, "context": 2}], ids=str)
def test_log_probabilities_of_a_prompt(folder, mesh, oracle, sizes, monkeypatch):
    """In several chunks, next to a request that did not ask, also of a prompt that was read before."""
    from treering.configs.sampling import RequestConfig
    from treering.infer import chunks
    from treering.infer.request import Session
    from treering.infer.scheduler import Scheduler

    monkeypatch.setattr(chunks, "PREFILL_CHUNKS", (4, 16))
    (row, *_), logits = oracle
    table = logits[0, :39].astype(np.float64)
    table -= np.log(np.exp(table - table.max(-1, keepdims=True)).sum(-1, keepdims=True)) + table.max(-1, keepdims=True)
    scheduler = Scheduler(test_engine.make_engine(folder, mesh, sizes, batch=2, capacity=64))
    plain = RequestConfig(max_new_tokens=2)
    asking = RequestConfig(max_new_tokens=2, logprobs=3, prompt_logprobs=True)
    for _ in range(2):
        numbers = [scheduler.submit(row[:n], config) for n, config in ((39, plain), (40, asking))]
        first = {event.request: event for event in reversed(list(scheduler.run()))}
        assert first[numbers[0]].prompt_logprobs is None
        scores = first[numbers[1]].prompt_logprobs
        expected = table[np.arange(39), row[1:40]]
        assert np.abs(np.array([one.logprob for one in scores]) - expected).max() <= 1e-4
        assert [[token for token, _ in one.top] for one in scores] == np.argsort(-table)[:, :3].tolist()
    # Without alternatives it is another program than that of a prompt that is not scored.
    scheduler.submit(row[:40], RequestConfig(max_new_tokens=2, prompt_logprobs=True))
    (alone,) = [event.prompt_logprobs for event in scheduler.run() if event.prompt_logprobs]
    assert [one.logprob for one in alone] == pytest.approx([one.logprob for one in scores], abs=1e-4)
    assert not any(one.top for one in alone)
    with pytest.raises(ValueError, match="max_new_tokens 0: prompt_logprobs requires at least 1"):
        RequestConfig(max_new_tokens=0, prompt_logprobs=True)
    with pytest.raises(ValueError, match="leave room for 1"):
        scheduler.submit([1] * 64, asking)
    with pytest.raises(ValueError, match="a session's row"):
        scheduler.submit([1], asking, session=Session())

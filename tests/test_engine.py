"""Prefill and decode: equal to one full pass, on every mesh, for rows of any length."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

import tiny

MESHES = [
    {"context": 1},
    {"context": 2},
    {"context": 3},
    {"context": 8},
    {"context": 4, "tensor": 2},
    {"data": 2, "context": 2, "tensor": 2},
]
LENGTHS = (1, 3, 7, 16, 17, 31, 39, 40)


def name(sizes):
    return "-".join(f"{axis}{size}" for axis, size in sizes.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from treering.models.conversion.convert import convert

    source = tiny.write_folder(tmp_path_factory.mktemp("tiny") / "hf")
    convert(source, source.parent / "checkpoint")
    return source.parent / "checkpoint"


def make_engine(folder, mesh, sizes, *, batch, capacity, unrolled=False):
    from treering.configs.precision import Precision
    from treering.infer.engine import Engine
    from treering.layers.parallel.sharding import Plan
    from treering.models.checkpoint.model import load_model

    plan = Plan(mesh(**sizes), "decode")
    model = load_model(folder, plan, "float32")
    if unrolled:
        model = model.unrolled(rows=batch if plan.mesh.size == 1 else 1)
    return Engine(model, plan, Precision(), batch=batch, capacity=capacity)


@contextlib.contextmanager
def counted(engine):
    """How many tokens each call meanwhile appends."""
    appended = []
    append = engine.append_program

    def counting(rows, chunk, **options):
        program = append(rows, chunk, **options)

        def run(model, state, index, tokens, count):
            appended.append(int(np.sum(count)))
            return program(model, state, index, tokens, count)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "append_program", counting)
        yield appended


def token_rows(count, length, seed=0):
    return np.random.default_rng(seed).integers(0, tiny.LLAMA["vocab_size"], (count, length)).tolist()


@pytest.fixture(scope="module")
def oracle():
    """Logits `[rows positions vocab]` of one full pass in transformers over 46 tokens of eight rows."""
    torch = pytest.importorskip("torch")
    rows = token_rows(len(LENGTHS), 46)
    with torch.inference_mode():
        return rows, tiny.torch_model()(input_ids=torch.tensor(rows)).logits.numpy()


@pytest.mark.parametrize("sizes", MESHES, ids=name)
def test_prefill_and_decode_equal_one_pass(folder, mesh, oracle, sizes):
    """Rows of unequal length, prefilled together in padded chunks, then six tokens one by one."""
    rows, logits = oracle
    engine = make_engine(folder, mesh, sizes, batch=len(rows), capacity=48)
    prompts = [row[:length] for row, length in zip(rows, LENGTHS, strict=True)]
    ours, state = engine.append(engine.empty_state(), prompts)
    for step in range(7):
        expected = np.stack([logits[i, length + step - 1] for i, length in enumerate(LENGTHS)])
        assert np.abs(np.asarray(ours) - expected).max() <= 1e-5 * np.abs(logits).max(), step
        if step < 6:
            ours, state = engine.append(state, [[row[n + step]] for row, n in zip(rows, LENGTHS, strict=True)])
    assert np.array_equal(np.asarray(state.cache.lengths), np.array(LENGTHS) + 6)


@pytest.mark.parametrize("chunk", [1, 3, 5, 16])
def test_any_chunk_size_gives_the_same_logits(folder, mesh, oracle, chunk, monkeypatch):
    """Rows of several pages, of which the larger chunks take two at a time, where a pair may end past the last."""
    from treering.infer import chunks, engine
    from treering.layers.attention.kernels import paged_xla

    monkeypatch.setattr(chunks, "PREFILL_CHUNKS", (chunk,))
    monkeypatch.setattr(engine, "PAGE_SLOTS", 2)
    monkeypatch.setattr(paged_xla, "MANY_QUERIES", 5)
    monkeypatch.setattr(paged_xla, "KEY_TILE", 4)
    rows, logits = oracle
    engine = make_engine(folder, mesh, {"context": 4}, batch=1, capacity=46)
    state = engine.empty_state()
    for start in range(0, 46, chunk):
        end = min(start + chunk, 46)
        ours, state = engine.append(state, [rows[0][start:end]])
        assert np.abs(np.asarray(ours)[0] - logits[0, end - 1]).max() <= 1e-5 * np.abs(logits).max(), end


@pytest.mark.long
def test_greedy_tokens_are_those_of_each_row_alone_on_every_mesh(folder, mesh):
    prompts = [row[:length] for row, length in zip(token_rows(4, 40, seed=1), (1, 5, 5, 40), strict=True)]
    alone = make_engine(folder, mesh, {"context": 1}, batch=1, capacity=64)
    expected = [collect(alone, [prompt], max_new_tokens=12)[0] for prompt in prompts]
    for sizes in ({"context": 8}, {"data": 2, "context": 2, "tensor": 2}):
        engine = make_engine(folder, mesh, sizes, batch=4, capacity=64)
        assert collect(engine, prompts, max_new_tokens=12) == expected, sizes
    unrolled = make_engine(folder, mesh, {"context": 2}, batch=4, capacity=64, unrolled=True)
    assert collect(unrolled, prompts, max_new_tokens=12) == expected


def test_rows_of_an_unrolled_model_together_draw_what_each_draws_alone(folder, mesh):
    """Alone by weights as they are, together by weights stored in dims first."""
    from treering.layers.nn.linear import InputsFirst

    prompts = [row[:length] for row, length in zip(token_rows(4, 40, seed=1), (1, 5, 5, 40), strict=True)]
    alone, together = (
        make_engine(folder, mesh, {"context": 1}, batch=batch, capacity=64, unrolled=True) for batch in (1, 4)
    )
    assert isinstance(together.model.blocks.pattern[0][0].mlp.down.weight, InputsFirst)
    expected = [collect(alone, [prompt], max_new_tokens=12)[0] for prompt in prompts]
    assert collect(together, prompts, max_new_tokens=12) == expected


def events_of(engine, prompts, *, end_ids=(), **options):
    """The events of each prompt, all submitted at once to a fresh scheduler."""
    from treering.configs.sampling import RequestConfig
    from treering.infer.scheduler import Scheduler

    scheduler = Scheduler(engine)
    numbers = [scheduler.submit(prompt, RequestConfig(**options), end_ids=end_ids) for prompt in prompts]
    made = {number: [] for number in numbers}
    for event in scheduler.run():
        made[event.request].append(event)
    return [made[number] for number in numbers]


def collect(engine, prompts, **options):
    made = events_of(engine, prompts, **options)
    return [[event.token for event in events if event.token is not None] for events in made]


@pytest.mark.smoke
def test_a_request_after_others_equals_a_fresh_one(folder, mesh):
    engine = make_engine(folder, mesh, {"context": 4}, batch=1, capacity=64)
    first, second = token_rows(2, 30, seed=2)
    fresh = collect(engine, [first], max_new_tokens=8)
    collect(engine, [second], max_new_tokens=20)
    assert collect(engine, [first], max_new_tokens=8) == fresh


@pytest.mark.parametrize("prompt_length", [6, 15, 16])
def test_a_full_row_ends_with_length_and_the_right_tokens(folder, mesh, prompt_length):
    prompt = token_rows(1, prompt_length, seed=3)[0]
    wide = make_engine(folder, mesh, {"context": 2}, batch=1, capacity=64)
    narrow = make_engine(folder, mesh, {"context": 2}, batch=1, capacity=16)
    room = 16 - prompt_length
    expected = collect(wide, [prompt], max_new_tokens=room)[0]
    for wanted in {max(room - 1, 0), room, room + 1, 100}:
        events = events_of(narrow, [prompt], max_new_tokens=wanted)[0]
        tokens = [event.token for event in events if event.token is not None]
        assert tokens == expected[: min(wanted, room)]
        assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]


def test_rows_stop_one_by_one_at_any_end_token(folder, mesh):
    engine = make_engine(folder, mesh, {"context": 2}, batch=4, capacity=64)
    prompts = token_rows(4, 9, seed=4)
    free = collect(engine, prompts, max_new_tokens=10)
    ends = frozenset({free[0][2], free[2][5]})
    for row, events in zip(free, events_of(engine, prompts, max_new_tokens=10, end_ids=ends), strict=True):
        at = next((i for i, token in enumerate(row) if token in ends), None)
        assert [event.token for event in events] == row[: 10 if at is None else at + 1]
        assert events[-1].finish_reason == ("length" if at is None else "stop")


def test_the_table_of_pages_may_be_any_permutation(folder, mesh):
    """Rows find their keys through the table, wherever their pages are."""
    rows = token_rows(4, 60, seed=5)
    engine = make_engine(folder, mesh, {"context": 2}, batch=4, capacity=1100)
    fresh, _ = engine.append(engine.empty_state(), rows)
    state = engine.empty_state()
    table = np.asarray(state.cache.table)
    assert table.size > 4
    shuffled = np.random.default_rng(0).permutation(table.size).astype(np.int32).reshape(table.shape)
    moved = jax.device_put(shuffled, state.cache.table.sharding)
    state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, table=moved))
    moved, _ = engine.append(state, rows)
    assert np.array_equal(np.asarray(fresh), np.asarray(moved))


def test_wrong_requests_are_refused_by_name(folder, mesh):
    from treering.configs.sampling import RequestConfig
    from treering.infer.scheduler import Scheduler

    scheduler = Scheduler(make_engine(folder, mesh, {"data": 2}, batch=2, capacity=8))
    for prompt, word in (([], "empty"), ([1] * 9, "9 tokens"), ([96], "vocabulary of 96"), ([-1], "outside")):
        with pytest.raises(ValueError, match=word):
            scheduler.submit(prompt, RequestConfig())
    with pytest.raises(ValueError, match="batch 3"):
        make_engine(folder, mesh, {"data": 2}, batch=3, capacity=8)

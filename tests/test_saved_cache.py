"""Caches on disk: in the order of the text, the same bits on every mesh, for their owner and their weights alone."""

import dataclasses
import json
import os
import re
import shutil
import stat

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hlo
import tiny
from test_engine import counted

MESHES = [
    {"context": 1},
    {"context": 2},
    {"context": 3},
    {"context": 4, "tensor": 2},
    {"data": 2, "context": 2},
    {"context": 8},
]
LENGTHS = (1, 17, 90)
"""Tokens saved: fewer than devices, and numbers that neither pages nor axes divide."""
CAPACITY = 128


def name(sizes):
    return "-".join(f"{axis}{size}" for axis, size in sizes.items())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.llama_checkpoint(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def engine_on(checkpoint, mesh):
    """`engine_on(sizes)`: an engine of small pages, made once."""
    from treering.configs.precision import Precision
    from treering.infer import engine as module
    from treering.layers.parallel.sharding import Plan
    from treering.models.checkpoint.model import load_model

    made = {}

    def make(sizes):
        if name(sizes) not in made:
            plan = Plan(mesh(**sizes), "decode")
            model = load_model(checkpoint, plan, "float32")
            if sizes["context"] == 1:
                model = model.unrolled()
            batch = 2 * plan.size("data")
            made[name(sizes)] = module.Engine(model, plan, Precision(), batch=batch, capacity=CAPACITY)
        return made[name(sizes)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PAGE_SLOTS", 8)
        yield make


def tokens_of(count, seed=0):
    return np.random.default_rng(seed).integers(5, 300, count).tolist()


def reader(engine):
    from treering.infer.saved_cache.record import ModelIdentity

    return ModelIdentity.of(engine.model.config, checkpoint="somewhere", weights="w", dtype=engine.precision.cache)


def read(engine, tokens):
    """A scheduler, and a session of it that has read `tokens`."""
    from treering.configs.sampling import RequestConfig
    from treering.infer.request import Session
    from treering.infer.scheduler import Scheduler

    scheduler, session = Scheduler(engine), Session()
    scheduler.submit(tokens, RequestConfig(max_new_tokens=0), session=session)
    (event,) = scheduler.run()
    assert event.finish_reason == "length" and session.tokens == tokens
    return scheduler, session


def answer(scheduler, prompt, session=None):
    """Greedy tokens, and their log-probabilities with those of the most likely others."""
    from treering.configs.sampling import RequestConfig

    scheduler.submit(prompt, RequestConfig(max_new_tokens=5, logprobs=4), session=session)
    events = list(scheduler.run())
    numbers = [[event.logprob.logprob, *(value for _, value in event.logprob.top)] for event in events]
    return [event.token for event in events], np.array(numbers)


def arrays_of(folder, length):
    """What is saved, `[length kv_heads head_dim]` by layer and name."""
    from treering.models.checkpoint.arrays import read_array, read_shapes

    layers = sorted((folder / "layers").iterdir(), key=lambda path: int(path.name))
    shapes = [read_shapes(layer) for layer in layers]
    assert all(set(shape) == {"keys", "values"} for shape in shapes)
    return [
        {name: read_array(layer, name, leaf.dtype)[:length] for name, leaf in shape.items()}
        for layer, shape in zip(layers, shapes, strict=True)
    ]


def same(one, other):
    return all(
        np.array_equal(a[name].view(np.uint8), b[name].view(np.uint8))
        for a, b in zip(one, other, strict=True)
        for name in ("keys", "values")
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [*MESHES, {"data": 2, "context": 2, "tensor": 2}], ids=name)
def test_a_row_is_read_and_written_in_the_order_of_its_text(mesh, sizes, dtype):
    """Any bits, -0.0 among them, from scattered pages; what is written there and read again is what it was."""
    from treering.layers.operations.pool import NO_PAGE, PagePool, token_divisor
    from treering.layers.parallel.sharding import Plan

    plan, slots, length, layers, kv_heads, head_dim = Plan(mesh(**sizes), "decode"), 4, 37, 2, 2, 6
    groups, devices = plan.size("data", "fsdp"), plan.size("context")
    page_tokens = slots * devices
    own = -(-length // page_tokens)
    share = token_divisor(plan)
    padded = -(-length // share) * share
    rng = np.random.default_rng(0)
    text = rng.integers(-2, 3, (2, layers, padded, kv_heads, head_dim)) * rng.choice([-0.0, 1.5], padded)[:, None, None]
    text = np.asarray(text, jnp.dtype(dtype))
    pages = np.full((groups, -(-padded // page_tokens)), NO_PAGE, np.int32)
    pages[-1, :own] = rng.permutation(own + 3)[:own]
    pages = jax.device_put(pages, plan.sharding("batch row_pages", pages.shape))

    def make():
        shape = {"layers": layers, "pages": groups * (own + 3), "kv_heads": kv_heads, "head_dim": head_dim}
        empty = PagePool.empty(**shape, page_tokens=page_tokens, dtype=jnp.dtype(dtype))
        return jax.tree.map(lambda x: x + 7, empty)

    pool = plan.init(make, "activations")
    sharding = plan.sharding("kv_seq kv_heads head_dim", text.shape[2:])
    write = jax.jit(lambda pool, *inputs: pool.write(*inputs, plan=plan))
    take = jax.jit(lambda pool, *inputs: pool.read(*inputs, tokens=padded, plan=plan))
    for layer in range(layers):
        pool = write(pool, layer, pages, *(jax.device_put(part[layer], sharding) for part in text))
    for layer in range(layers):
        found = np.stack([np.asarray(x) for x in take(pool, layer, pages, length)])
        assert np.array_equal(found[:, :length].view(np.uint8), text[:, layer, :length].view(np.uint8))
        assert not found[:, length:].any()
    # No page but the row's is written: the rest of the pool is as it was.
    untouched = np.asarray(pool.values).reshape(layers, groups, own + 3, -1)
    taken = np.asarray(pages)[-1, :own]
    kept = [page for page in range(own + 3) if page not in taken]
    assert (untouched[:, -1, kept] == 7).all() and (untouched[:, :-1] == 7).all()
    # Where token 0, 1, ... of the text are in the pool, by the rule of the module.
    t = np.arange(length)
    rank, slot = t % devices, t // devices
    place = (groups - 1) * (own + 3) + taken[slot // slots]
    inside = rank * slots + slot % slots
    assert np.array_equal(np.asarray(pool.values)[1, place, :, inside], text[1, 1, :length])
    assert np.array_equal(np.asarray(pool.keys)[1, place, :, :, inside], text[0, 1, :length])
    launches = hlo.read(take.lower(pool, 0, pages, length).compile()).launches()
    assert launches == ({"all-to-all": 1} if devices > 1 else {}) | ({"all-reduce": 1} if groups > 1 else {})
    launches = hlo.read(write.lower(pool, 0, pages, *text[:, 0]).compile()).launches()
    assert launches.get("all-to-all", 0) == (devices > 1) and "all-gather" not in launches


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        ({"context": 1}, {"context": 8}),
        pytest.param({"context": 4, "tensor": 2}, {"context": 3}, marks=pytest.mark.long),
        pytest.param({"context": 2}, {"context": 1}, marks=pytest.mark.long),
        pytest.param({"data": 2, "context": 2}, {"context": 4, "tensor": 2}, marks=pytest.mark.long),
        pytest.param({"context": 8}, {"data": 2, "context": 2}, marks=pytest.mark.long),
        pytest.param({"context": 3}, {"context": 2}, marks=pytest.mark.long),
    ],
    ids=name,
)
def test_a_cache_loaded_on_another_mesh_answers_as_the_joined_text(engine_on, tmp_path, saving, loading):
    """And is the same, bit for bit, when that mesh saves it again."""
    from treering.infer.saved_cache.folder import load_cache, save_cache
    from treering.infer.saved_cache.record import read_saved_cache
    from treering.infer.scheduler import Scheduler

    for length in LENGTHS:
        text, question = tokens_of(length), tokens_of(7, seed=1)
        scheduler, session = read(engine_on(saving), text)
        save_cache(tmp_path / f"{length}", scheduler, session, reader(scheduler.engine))
        saved = read_saved_cache(tmp_path / f"{length}")
        assert saved.tokens == text
        # On the mesh that saved it: the bits of the row that it was saved from.
        kept = answer(scheduler, text + question, session)
        again = Scheduler(engine_on(saving))
        back = answer(again, text + question, load_cache(saved, again)[0])
        assert back[0] == kept[0] and np.array_equal(back[1], kept[1])

        other = Scheduler(engine_on(loading))
        there, size = load_cache(saved, other)
        assert size == length * 2 * 2 * 2 * 8 * 4
        save_cache(tmp_path / f"{length} again", other, there, saved.identity)
        assert same(arrays_of(tmp_path / f"{length} again", length), arrays_of(saved.folder, length))
        assert read_saved_cache(tmp_path / f"{length} again").fingerprint == saved.fingerprint
        found = answer(other, text + question, there)
        unsaved = answer(Scheduler(engine_on(loading)), text + question)
        assert found[0] == unsaved[0] and np.abs(found[1] - unsaved[1]).max() < 1e-4
        other.close(there)
        assert all(other.pages.free(group) == other.engine.group_pages for group in range(other.engine.groups))


def test_no_copy_of_the_cache_is_made_where_a_layer_is_read_or_written(mesh, monkeypatch):
    """A row of one page, in a pool of eight."""
    from treering.configs.llama import LLAMA_3_2_1B_CUT
    from treering.configs.precision import Precision
    from treering.infer import engine as module
    from treering.infer.saved_cache.row_transfer import RowTransfer
    from treering.infer.scheduler import Scheduler
    from treering.layers.parallel.sharding import Plan
    from treering.models.families import families

    plan, tokens = Plan(mesh(context=8), "decode"), 8 * 64
    config = dataclasses.replace(LLAMA_3_2_1B_CUT, layers=16, kv_heads=2, head_dim=8)
    shapes = eqx.filter_eval_shape(lambda: families()["llama"].init(config, jax.random.key(0)))
    monkeypatch.setattr(module, "PAGE_SLOTS", 64)
    engine = module.Engine(plan.abstract(shapes, "parameters"), plan, Precision(), batch=1, capacity=tokens, pages=8)
    scheduler = Scheduler(engine)
    row = RowTransfer(scheduler, scheduler.hold([0] * tokens))
    share = 2 * 64 * 2 * 8 * 4
    """Bytes of a layer's keys and values in this row on one device."""
    assert engine.cache_bytes_per_device() == 16 * 8 * share
    write, read = (hlo.read(program.compiled) for program in (row.write_program(0), row.read_program(0)))
    assert min(write.alias_bytes, read.alias_bytes) >= 16 * 8 * share, "the pool is not donated"
    assert max(write.temporary_bytes, read.temporary_bytes) <= 4 * share
    assert [c.received for c in write.collectives] == [c.received for c in read.collectives] == [share * 7 // 8]


def test_a_row_from_disk_reads_nothing_again_and_leaves_its_neighbours_alone(engine_on, tmp_path):
    from treering.configs.sampling import RequestConfig
    from treering.infer.saved_cache.folder import load_cache, save_cache
    from treering.infer.saved_cache.record import read_saved_cache
    from treering.infer.scheduler import Scheduler

    engine = engine_on({"context": 2})
    text, question, another = tokens_of(60), tokens_of(5, seed=1), tokens_of(40, seed=2)
    scheduler, session = read(engine, text)
    save_cache(tmp_path / "cache", scheduler, session, reader(engine))
    alone = [answer(Scheduler(engine), prompt)[0] for prompt in (text + question, another, text)]

    scheduler = Scheduler(engine)
    session, _ = load_cache(read_saved_cache(tmp_path / "cache"), scheduler)
    with counted(engine) as appended:
        config = RequestConfig(max_new_tokens=5)
        numbers = [
            scheduler.submit(text + question, config, session=session),
            scheduler.submit(another, config),
            scheduler.submit(text, config),
        ]
        made = {number: [] for number in numbers}
        for event in scheduler.run():
            made[event.request].append(event.token)
    assert list(made.values()) == alone
    assert sorted(appended) == [5, 40, 60]
    with pytest.raises(ValueError, match=f"take a row of {CAPACITY}"):
        scheduler.hold(tokens_of(CAPACITY + 1))
    scheduler.hold(another)
    with pytest.raises(ValueError, match="none has them free"):
        scheduler.hold(another)


@pytest.mark.parametrize("sizes", [{"context": 2}, pytest.param({"data": 2, "context": 2}, marks=pytest.mark.long)])
def test_requests_share_the_full_pages_of_a_session_that_was_released(engine_on, tmp_path, sizes):
    """Pages are of 16 tokens here, and another caller does not share them."""
    from treering.configs.sampling import RequestConfig
    from treering.infer.saved_cache.folder import load_cache, save_cache
    from treering.infer.saved_cache.record import read_saved_cache
    from treering.infer.scheduler import Scheduler

    engine = engine_on(sizes)
    text, questions = tokens_of(60), [tokens_of(5, seed=seed) for seed in range(1, 4)]
    save_cache(tmp_path / "cache", *read(engine, text), reader(engine))
    alone = [answer(Scheduler(engine), text + question)[0] for question in questions]
    scheduler = Scheduler(engine)
    session, _ = load_cache(read_saved_cache(tmp_path / "cache"), scheduler)
    scheduler.release(session)
    assert session.row is None and all(scheduler.pages.free(g) == engine.group_pages for g in range(engine.groups))
    for callers, read_again in ((["", "", ""], 3 * [60 % 16 + 5]), (["other"], [60 + 5])):
        with counted(engine) as appended:
            for caller, question, right in zip(callers, questions, alone, strict=False):
                number = scheduler.submit(text + question, RequestConfig(max_new_tokens=5), caller=caller)
                assert [event.token for event in scheduler.run() if event.request == number] == right
        assert appended == read_again


@pytest.mark.long
def test_layers_of_all_places_and_of_a_broken_off_period_are_saved(mesh, tmp_path):
    """Gemma 3: two places, one of them with a window, and a period that breaks off; stacked or not, the files are the
    same layers by number."""
    from treering.configs.gemma import Gemma3Config
    from treering.configs.precision import Precision
    from treering.configs.rope import DefaultRope
    from treering.infer.engine import Engine
    from treering.infer.saved_cache.folder import load_cache, save_cache
    from treering.infer.saved_cache.record import read_saved_cache
    from treering.infer.scheduler import Scheduler
    from treering.layers.parallel.sharding import Plan
    from treering.models.families import families

    config = Gemma3Config(
        **{"vocab": 300, "embed": 48, "layers": 5, "heads": 8, "kv_heads": 2, "head_dim": 16, "mlp": 80},
        **{"context_length": 256, "norm_eps": 1e-6, "tie_embeddings": True, "rope": DefaultRope(theta=1e6)},
        **{"window": 7, "period": 2, "local_theta": 1e4, "query_scalar": 24},
    )
    engines = []
    for sizes, unrolled in (({"context": 4}, False), ({"context": 1}, True)):
        plan = Plan(mesh(**sizes), "decode")
        model = plan.init(lambda: families()["gemma3"].init(config, jax.random.key(0)), "parameters")
        assert len(model.blocks.pattern) == 2 and len(model.blocks.tail) == 1
        model = model.unrolled() if unrolled else model
        engines.append(Engine(model, plan, Precision(), batch=1, capacity=CAPACITY))
    text, question = tokens_of(41), tokens_of(9, seed=1)
    scheduler, session = read(engines[0], text)
    save_cache(tmp_path / "cache", scheduler, session, reader(engines[0]))
    other = Scheduler(engines[1])
    session, _ = load_cache(read_saved_cache(tmp_path / "cache"), other)
    save_cache(tmp_path / "again", other, session, reader(engines[1]))
    assert same(arrays_of(tmp_path / "cache", 41), arrays_of(tmp_path / "again", 41))
    found, unsaved = answer(other, text + question, session), answer(Scheduler(engines[1]), text + question)
    assert found[0] == unsaved[0] and np.abs(found[1] - unsaved[1]).max() < 1e-4
    # By its number each layer is that of the other form, which read the text itself.
    scheduler, session = read(engines[1], text)
    save_cache(tmp_path / "unrolled", scheduler, session, reader(engines[1]))
    stacked, alone = arrays_of(tmp_path / "cache", 41), arrays_of(tmp_path / "unrolled", 41)
    assert len(stacked) == 5
    for one, two in zip(stacked, alone, strict=True):
        assert all(np.abs(one[kind] - two[kind]).max() < 1e-4 for kind in ("keys", "values"))


# Refusals.


@pytest.fixture(scope="module")
def command(checkpoint):
    """`command(*options)`: exit status and what `treering generate` said, run here on eight devices."""
    import contextlib
    import io

    import treering

    def run(*options, model=checkpoint):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = treering.main(["generate", str(model), *map(str, options)])
        return status, out.getvalue(), err.getvalue()

    return run


@pytest.fixture(scope="module")
def cache(command, tmp_path_factory):
    """A cache that the command saved with 8 devices on the context axis, reading 15 tokens and answering nothing."""
    folder = tmp_path_factory.mktemp("kept") / "cache"
    status, out, err = command("--prompt", "The capital of France is", "--save-cache", folder, "--max-new-tokens", "0")
    assert (status, out) == (0, ""), err
    assert f"tokens saved in {folder}: " in err
    assert re.fullmatch(
        r"15 tokens read in \d+\.\d\d s; nothing generated: --max-new-tokens is 0", err.splitlines()[-1]
    )
    return folder


def test_the_command_goes_on_from_a_cache_on_another_mesh(cache, command, engine_on, checkpoint, tmp_path):
    from treering.infer.saved_cache.record import read_saved_cache
    from treering.infer.scheduler import Scheduler
    from treering.models.tokenizer import Tokenizer

    held, tokenizer = read_saved_cache(cache).tokens, Tokenizer.load(checkpoint)
    assert held == tokenizer.encode("The capital of France is")
    question = tokenizer.encode(" Paris. The year")
    assert question[0] == held[0] == tokenizer.named_ids["bos"]
    mesh = ("--mesh.context", "4", "--mesh.tensor", "2", "--max-new-tokens", "5", "--json")
    files = ("--load-cache", cache, "--save-cache", tmp_path / "longer")
    status, out, err = command("--prompt", " Paris. The year", *files, *mesh)
    assert status == 0 and f"{len(held)} tokens loaded from {cache}: " in err
    expected, _ = answer(Scheduler(engine_on({"context": 4, "tensor": 2})), held + question[1:])
    assert json.loads(out)["tokens"] == expected
    assert json.loads(out)["prompt_tokens"] == len(held) + len(question) - 1
    # In a file of prompts it is asked the same.
    (tmp_path / "prompts.jsonl").write_text('{"prompt": " Paris. The year"}\n')
    many = ("--prompts", tmp_path / "prompts.jsonl", "--output", tmp_path / "answers", "--load-cache", cache)
    status, _, err = command(*many, *mesh[:-1])
    assert status == 0 and json.loads((tmp_path / "answers").read_text())["tokens"] == expected, err
    # What was saved on the way holds both texts.
    longer = read_saved_cache(tmp_path / "longer").tokens
    assert longer == held + question[1:]
    status, out, err = command("--prompt", "!", "--load-cache", tmp_path / "longer", *mesh)
    expected, _ = answer(Scheduler(engine_on({"context": 4, "tensor": 2})), longer + tokenizer.encode("!")[1:])
    assert json.loads(out)["tokens"] == expected


@pytest.mark.long
def test_many_questions_are_asked_of_one_cache(cache, command, tmp_path):
    sampled = ("--load-cache", cache, "--temperature", "1", "--max-new-tokens", "4")
    two = ("--prompt", " Paris", *sampled, "--seed", "7", "--n", "2", "--json")
    alone = []
    for question, seed in ((" Paris", 7), ("!", 0)):
        status, out, err = command("--prompt", question, *sampled, "--seed", seed, "--json")
        assert status == 0, err
        alone.append(json.loads(out))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": " Paris", "n": 2, "seed": 7}\n{"prompt": "!"}\n')
    files = ("--prompts", tmp_path / "prompts.jsonl", "--output", tmp_path / "answers")
    status, _, err = command(*files, *sampled)
    assert status == 0, err
    pair, one = sorted(map(json.loads, (tmp_path / "answers").read_text().splitlines()), key=lambda one: one["index"])
    assert (pair["answers"][0]["tokens"], one["tokens"]) == (alone[0]["tokens"], alone[1]["tokens"])
    assert (pair["prompt_tokens"], one["prompt_tokens"]) == (alone[0]["prompt_tokens"], alone[1]["prompt_tokens"])
    # The same by an option, and saved on the way.
    status, out, err = command(*two, "--save-cache", tmp_path / "longer")
    assert status == 0, err
    assert [one["tokens"] for one in json.loads(out)["answers"]] == [one["tokens"] for one in pair["answers"]]
    assert len(json.loads((tmp_path / "longer" / "cache.json").read_text())["tokens"]) == pair["prompt_tokens"]
    # Without the cache they are other prompts.
    status, _, err = command(*files, *sampled[2:])
    assert status == 2 and "answers other prompts" in err


def test_a_conversation_continues_a_cache_and_starts_over_behind_it(cache, engine_on, checkpoint):
    from treering.configs.sampling import RequestConfig
    from treering.infer.saved_cache.folder import load_cache
    from treering.infer.saved_cache.record import read_saved_cache
    from treering.infer.scheduler import Scheduler
    from treering.infer.text.chat import Conversation
    from treering.models.tokenizer import Tokenizer

    saved, tokenizer, request = read_saved_cache(cache), Tokenizer.load(checkpoint), RequestConfig(max_new_tokens=5)
    engine = engine_on({"context": 2})
    scheduler = Scheduler(engine)
    session, _ = load_cache(saved, scheduler)
    talk = Conversation(scheduler, tokenizer, request, session=session)
    whole = saved.tokens + tokenizer.encode_chat([{"role": "user", "content": "And?"}])[1:]
    expected = tokenizer.decode(answer(Scheduler(engine), whole)[0])
    for _ in range(2):
        assert "".join(talk.reply("And?")) == expected
        talk.reset()
        assert session.tokens[: len(saved.tokens)] == saved.tokens and talk.messages == []


def test_the_chat_command_takes_a_cache(cache, checkpoint, capsys, monkeypatch):
    import treering

    lines = iter(["And?", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    options = ["--load-cache", str(cache), "--capacity", "60", "--max-new-tokens", "3"]
    assert treering.main(["chat", str(checkpoint), *options]) == 0
    said = capsys.readouterr()
    assert f"tokens loaded from {cache}: " in said.err and said.out.strip()
    assert treering.main(["chat", str(checkpoint), *options, "--dtype", "float16"]) == 2
    assert "have another dtype (works: float32)" in capsys.readouterr().err


def test_files_are_their_owners_alone_also_while_they_are_written(engine_on, tmp_path, monkeypatch):
    """By the mode of the folder that all of them are in; other threads' files have their usual modes meanwhile."""
    from treering.infer.saved_cache import folder as saved_cache

    def mode(path):
        return stat.S_IMODE(path.stat().st_mode)

    meanwhile, write = [], saved_cache.write_arrays

    def watched(folder, arrays):
        meanwhile.append(mode(tmp_path / "cache.partial"))
        write(folder, arrays)
        (tmp_path / f"another {folder.name}").touch()
        meanwhile.append(mode(tmp_path / "cache.partial"))

    before = os.umask(0o022)
    try:
        monkeypatch.setattr(saved_cache, "write_arrays", watched)
        scheduler, session = read(engine_on({"context": 2}), tokens_of(9))
        # What an earlier process left is made private before anything is written into it.
        (tmp_path / "cache.partial" / "layers" / "0").mkdir(parents=True)
        saved_cache.save_cache(tmp_path / "cache", scheduler, session, reader(scheduler.engine))
    finally:
        os.umask(before)
    assert meanwhile == [0o700] * 4 and mode(tmp_path / "cache") == 0o700
    assert [mode(tmp_path / f"another {layer}") for layer in (0, 1)] == [0o644] * 2


@pytest.mark.parametrize("broken", [KeyboardInterrupt(), ValueError("no"), OSError(28, "No space left on device")])
def test_a_save_that_is_broken_off_leaves_nothing(engine_on, tmp_path, monkeypatch, broken):
    from treering.infer.saved_cache import folder as saved_cache
    from treering.infer.saved_cache.record import read_saved_cache

    write = saved_cache.write_arrays

    def breaks(folder, arrays):
        write(folder, arrays)
        if folder.name == "1":
            shutil.copytree(tmp_path / "cache.partial", tmp_path / "killed")
            raise broken

    scheduler, session = read(engine_on({"context": 2}), tokens_of(9))
    with monkeypatch.context() as patch, pytest.raises(type(broken)):
        patch.setattr(saved_cache, "write_arrays", breaks)
        saved_cache.save_cache(tmp_path / "cache", scheduler, session, reader(scheduler.engine))
    assert [path.name for path in tmp_path.iterdir()] == ["killed"]
    with pytest.raises(ValueError, match="is incomplete: it has no cache.json"):
        read_saved_cache(tmp_path / "killed")
    # One that a killed process left under the name of a partial folder is in nobody's way.
    shutil.move(tmp_path / "killed", tmp_path / "cache.partial")
    saved_cache.save_cache(tmp_path / "cache", scheduler, session, reader(scheduler.engine))
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


READER = ("checkpoint", "config", "weights", "dtype")


def change(record, **fields):
    raw = json.loads(record.read_text())
    record.write_text(json.dumps({**raw, **fields}))


def chunks(folder):
    return sorted(path for path in folder.glob("layers/1/values/*") if path.name[0].isdigit())


def flip(folder):
    file = chunks(folder)[0]
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)


def forget(folder):
    """A layer that cache.json does not know of either."""
    shutil.rmtree(folder / "layers" / "1")
    files = json.loads((folder / "cache.json").read_text())["files"]
    change(folder / "cache.json", files={name: size for name, size in files.items() if "layers/1" not in name})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "cache is damaged: its keys and values are not those that were saved"),
        (lambda folder: chunks(folder)[0].unlink(), "is incomplete: layers/1/values/0.0.0 has 0 of its 512 bytes"),
        (lambda folder: chunks(folder)[1].write_bytes(b"x"), "is incomplete: layers/1/values/1.0.0 has 1 of its 512 "),
        (lambda folder: shutil.rmtree(folder / "layers" / "1"), "is incomplete: layers/1/"),
        (forget, "cache is damaged: its keys and values"),
        (lambda folder: change(folder / "cache.json", tokens=[5, 6]), "cache is damaged: its keys and values"),
        (lambda folder: change(folder / "cache.json", tokens=[7] * 80), "cache is damaged: its keys and values"),
        (lambda folder: change(folder / "cache.json", files=[]), "cache.json is damaged"),
        (
            lambda folder: change(folder / "cache.json", tokens="5"),
            'cache.json: "tokens": it must be a list of token ids',
        ),
        (
            lambda folder: change(folder / "cache.json", tokens=[2**70]),
            'cache.json: "tokens": it must be a list of token ids',
        ),
        (
            lambda folder: change(folder / "cache.json", format=2),
            'cache.json: "format" 2: this version cannot read it .works: 1.',
        ),
        (lambda folder: change(folder / "cache.json", reader={}), "cache.json is damaged"),
        (lambda folder: change(folder / "cache.json", reader=dict.fromkeys(READER, 1)), "cache.json is damaged"),
        (lambda folder: (folder / "cache.json").write_text("{"), "cache.json is damaged"),
        (lambda folder: (folder / "cache.json").write_text("[" * 100_000), "cache.json is damaged"),
        (lambda folder: (folder / "cache.json").unlink(), "is incomplete: it has no cache.json"),
        (lambda folder: shutil.rmtree(folder), "does not exist: a saved cache is a folder that"),
    ],
)
def test_a_damaged_cache_is_refused_and_gives_its_row_back(cache, engine_on, tmp_path, damage, words):
    from treering.infer.saved_cache.folder import load_cache
    from treering.infer.saved_cache.record import read_saved_cache
    from treering.infer.scheduler import Scheduler

    shutil.copytree(cache, tmp_path / "cache")
    damage(tmp_path / "cache")
    scheduler = Scheduler(engine_on({"context": 2}))
    with pytest.raises(ValueError, match=words) as error:
        load_cache(read_saved_cache(tmp_path / "cache"), scheduler)
    assert str(tmp_path / "cache") in str(error.value)
    assert scheduler.pages.free(0) == scheduler.engine.group_pages and scheduler.hold([0]).row == 0


def test_a_cache_of_other_weights_another_model_or_dtype_is_refused(cache, command, checkpoint, tmp_path):
    from treering.models.conversion.convert import convert

    load = ("--prompt", "x", "--load-cache", cache)
    config = {**tiny.LLAMA, "vocab_size": 400}
    for case, changes, seed, words in (
        ("weights", {}, 1, ["is the cache of other weights (weights ", f"load it with {checkpoint}"]),
        (
            "theta",
            {"rope_theta": 5e5},
            0,
            ["of another model (rope ", "10000.0", "500000.0", f"load it with {checkpoint}"],
        ),
        ("layers", {"num_hidden_layers": 3}, 0, ["(layers 2 there, 3 in "]),
    ):
        source = tmp_path / case
        tiny.write_folder(source, {**config, **changes}, tiny.tensors({**config, **changes}, seed=seed))
        tiny.save_byte_level(source)
        status, out, err = command(*load, model=source)
        assert status == 2 and out == "" and all(word in err.splitlines()[-1] for word in words), err
    status, out, err = command(*load, "--dtype", "bfloat16")
    assert (
        status == 2 and f"--dtype bfloat16: the keys and values in {cache} have another dtype (works: float32)" in err
    )
    # The same weights in another form are the same: here as the folder that the checkpoint was converted from.
    status, out, err = command(*load, "--max-new-tokens", "1", model=checkpoint.parent / "hf")
    assert status == 0, err
    convert(checkpoint.parent / "hf", tmp_path / "converted again")
    assert command(*load, "--max-new-tokens", "1", "--layers", "unrolled", model=tmp_path / "converted again")[0] == 0


def test_what_cannot_be_done_is_told_before_any_work(cache, command, checkpoint, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thing").write_text("only copy")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "x" * 400}))
    (tmp_path / "scored.jsonl").write_text('{"prompt": "x", "prompt_logprobs": true}')
    many, long, scored = (
        ("--prompts", tmp_path / f"{name}.jsonl", "--output", tmp_path / "answers")
        for name in ("prompts", "long", "scored")
    )
    (tmp_path / "my.partial" / "layers").mkdir(parents=True)
    (tmp_path / "my.partial" / "layers" / "thing").write_text("only copy")
    held = len(json.loads((cache / "cache.json").read_text())["tokens"])
    for options, words in (
        (("--prompt", "x", "--save-cache", tmp_path / "mine"), "mine exists: choose another folder for --save-cache"),
        (("--prompt", "x", "--save-cache", cache), "exists: choose another folder"),
        (("--prompt", "x", "--save-cache", tmp_path / "my"), "my.partial first, which holds something else"),
        (("--prompt", "x", "--save-cache", cache / "more"), "more is inside a saved cache"),
        (("--prompt", "x", "--save-cache", tmp_path / "no" / "cache"), f"{tmp_path / 'no'} is not a folder"),
        (("--prompt", "x", "--load-cache", tmp_path / "mine"), "mine is not a saved cache"),
        (("--prompt", "x", "--load-cache", checkpoint), "is a checkpoint, not a saved cache"),
        (("--prompt", "x", "--load-cache", tmp_path / "prompts.jsonl"), "prompts.jsonl is not a saved cache"),
        (("--prompt", "x" * 400, "--load-cache", cache), f"tokens, {held} of them in {cache}, and the model's context"),
        ((*many, "--load-cache", tmp_path / "mine"), "mine is not a saved cache"),
        (
            (*many, "--load-cache", cache, "--prompt-logprobs"),
            "--prompt-logprobs cannot be used with --save-cache or --load-cache",
        ),
        (
            (*long, "--load-cache", cache),
            f"long.jsonl, line 1: the prompt has 400 tokens: from 1 to {256 - held} fit behind {cache}",
        ),
        (
            (*scored, "--load-cache", cache),
            'scored.jsonl, line 1: "prompt_logprobs": it cannot be used with --load-cache',
        ),
        ((*many, "--save-cache", tmp_path / "new"), "--save-cache requires --prompt"),
    ):
        status, out, err = command(*options)
        assert status == 2 and words in err and err.count("\n") == 1 and out == "", err
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("long.jsonl", "mine", "my.partial", "prompts.jsonl", "scored.jsonl")
    ]
    assert (tmp_path / "mine" / "thing").read_text() == "only copy"


def test_a_disk_without_room_is_told_before_the_text_is_read(command, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    status, out, err = command("--prompt", "The year", "--save-cache", tmp_path / "cache")
    assert status == 2 and out == "" and "bytes of keys and values, and 100 are free there" in err.splitlines()[-1]
    assert "compiled in" not in err and list(tmp_path.iterdir()) == []

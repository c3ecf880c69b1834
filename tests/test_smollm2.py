"""A real model: greedy tokens equal transformers' on every mesh, and the command prints them."""

import json
import pydoc_data.topics
import subprocess
import sys

import pytest

import smollm2

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "Question: What is 12 times 11?\nAnswer:",
    "Zürich, naïve café, 你好世界, 👍🏽:",
)
NEW_TOKENS = 48
TIE = 1e-3
MESHES = [{"context": n} for n in (1, 2, 3, 4, 8)] + [{"context": 2, "tensor": 3}]


@pytest.fixture(scope="module")
def checkpoint(demo_gguf, tmp_path_factory):
    from treering.models.conversion.convert import convert

    folder = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    convert(demo_gguf, folder)
    return folder


@pytest.fixture(scope="module")
def prompts(checkpoint):
    """Token ids of the prompts, a chat and a page of documentation of 1,500 tokens and more among them."""
    from treering.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(checkpoint)
    page = tokenizer.encode("\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)[:6]))
    chat = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    return [tokenizer.encode(text) for text in PROMPTS] + [chat, page[:1536]]


@pytest.fixture(scope="module")
def answer(demo_gguf):
    """`answer(prompt)` is transformers' greedy tokens, and the number of steps that come before a tie."""
    pytest.importorskip("torch")
    model = smollm2.torch_model(demo_gguf)
    known = {}

    def answered(prompt):
        if tuple(prompt) not in known:
            tokens, gaps = smollm2.greedy(model, prompt, NEW_TOKENS)
            known[tuple(prompt)] = tokens, next((i for i, gap in enumerate(gaps) if gap <= TIE), NEW_TOKENS)
        return known[tuple(prompt)]

    return answered


@pytest.fixture(scope="module")
def answers(answer, prompts):
    """Those of all prompts."""
    found = [answer(prompt) for prompt in prompts]
    compared = sum(steps for _, steps in found)
    assert compared >= 0.9 * NEW_TOKENS * len(prompts), "too many ties: choose other prompts"
    return found


def check_mesh(checkpoint, mesh, sizes, batches, *, unrolled=False):
    """Greedy tokens of `batches` of (prompt, answer), each a batch of the engine."""
    from treering.configs.precision import Precision
    from treering.configs.sampling import RequestConfig
    from treering.infer.engine import Engine
    from treering.infer.scheduler import Scheduler
    from treering.layers.parallel.sharding import Plan
    from treering.models.checkpoint.model import load_model

    plan = Plan(mesh(**sizes), "decode")
    model = load_model(checkpoint, plan, "float32")
    if unrolled:
        model = model.unrolled()
    for batch in batches:
        capacity = 2 ** (max(len(prompt) for prompt, _ in batch) + NEW_TOKENS).bit_length()
        engine = Engine(model, plan, Precision(), batch=len(batch), capacity=capacity)
        scheduler = Scheduler(engine)
        numbers = [scheduler.submit(prompt, RequestConfig(max_new_tokens=NEW_TOKENS)) for prompt, _ in batch]
        ours: dict[int, list[int]] = {number: [] for number in numbers}
        for event in scheduler.run():
            ours[event.request].append(event.token)
        for row, (prompt, (tokens, steps)) in zip(ours.values(), batch, strict=True):
            assert row[:steps] == tokens[:steps], (sizes, len(prompt))


def check_all(checkpoint, mesh, sizes, prompts, answers, *, unrolled=False):
    """The short prompts as rows of one batch, the long one by itself."""
    pairs = list(zip(prompts, answers, strict=True))
    check_mesh(checkpoint, mesh, sizes, [pairs[:-1], pairs[-1:]], unrolled=unrolled)


def test_greedy_tokens_equal_transformers(checkpoint, mesh, prompts, answer):
    check_mesh(checkpoint, mesh, {"context": 8}, [[(prompt, answer(prompt)) for prompt in prompts[:2]]])


@pytest.mark.long
@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "-".join(f"{a}{n}" for a, n in sizes.items()))
def test_greedy_tokens_equal_transformers_on_every_mesh(checkpoint, mesh, prompts, answers, sizes):
    check_all(checkpoint, mesh, sizes, prompts, answers)


@pytest.mark.long
@pytest.mark.parametrize("context", [1, 8])
def test_unrolled_blocks_give_the_same_tokens(checkpoint, mesh, prompts, answers, context):
    check_all(checkpoint, mesh, {"context": context}, prompts, answers, unrolled=True)


def test_the_command_answers(checkpoint):
    """One question through the front door, on eight simulated devices; standard output ends with one JSON object."""
    done = subprocess.run(
        [sys.executable, "-m", "treering", "generate", str(checkpoint), "--chat", "--prompt", "-", "--json"]
        + ["--cpu-devices", "8", "--mesh.context", "8", "--max-new-tokens", "16"],
        input="What is the capital of France?",
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["text"] == "The capital of France is Paris."
    assert answer["finish_reason"] == "stop" and answer["prompt_tokens"] == 37
    assert len(answer["tokens"]) == 8
    # float32 keys and values of 30 layers, 3 key heads of 64, for the tokens asked for, over 8 devices.
    assert answer["cache_bytes_per_device"] == 2 * 30 * 3 * 64 * 4 * -(-(37 + 16) // 8)
    assert answer["prefill_seconds"] > 0 and answer["decode_tokens_per_second"] > 0
    assert "mesh context 8 (8 CPU devices)" in done.stderr

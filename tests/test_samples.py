"""Several answers to one prompt, and the log-probabilities of the prompt itself, through the command."""

import json

import jax
import numpy as np
import pytest

import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.llama_checkpoint(tmp_path_factory.mktemp("samples"))


def run(checkpoint, capsys, *options):
    import treering

    status = treering.main(["generate", str(checkpoint), "--max-new-tokens", "5", *map(str, options)])
    said = capsys.readouterr()
    return status, said.out, said.err


SAMPLED = ("--temperature", "1")


def test_sample_i_is_the_answer_with_seed_plus_i(checkpoint, capsys):
    ask = ("--prompt", "The capital", *SAMPLED, "--json", "--logprobs", "2")
    status, out, err = run(checkpoint, capsys, *ask, "--seed", "7", "--n", "3", "--prompt-logprobs")
    assert status == 0, err
    joint = json.loads(out)
    assert [set(one) for one in joint["answers"]] == [{"text", "tokens", "finish_reason", "logprobs"}] * 3
    assert len({tuple(one["tokens"]) for one in joint["answers"]}) == 3
    for i in (0, 2):
        status, out, _ = run(checkpoint, capsys, *ask, "--seed", 7 + i)
        alone = json.loads(out)
        assert alone["tokens"] == joint["answers"][i]["tokens"] and alone["text"] == joint["answers"][i]["text"]
        assert alone["prompt_tokens"] == joint["prompt_tokens"]
    scored = joint["prompt_logprobs"]
    assert len(scored) == joint["prompt_tokens"] - 1 and all(len(one["top"]) == 2 for one in scored)
    first = joint["answers"][0]
    assert set(joint) >= {"prefill_seconds", "decode_tokens_per_second", "cache_bytes_per_device"}
    assert len(first["logprobs"]) == 5 and first["finish_reason"] == "length"


def test_the_scores_of_a_prompt_are_those_of_one_pass_over_it(checkpoint, mesh, capsys):
    from treering.layers.parallel.sharding import Plan
    from treering.models.checkpoint.model import load_model
    from treering.models.tokenizer import Tokenizer

    options = ("--prompt", tiny.CORPUS[1], "--logprobs", "1", "--prompt-logprobs", "--json")
    scored = json.loads(run(checkpoint, capsys, *options)[1])["prompt_logprobs"]
    ids, plan = np.array([Tokenizer.load(checkpoint).encode(tiny.CORPUS[1])]), Plan(mesh(), "decode")
    table = jax.nn.log_softmax(tiny.logits(load_model(checkpoint, plan), plan, ids)[0])
    right = [float(table[at, token]) for at, token in enumerate(ids[0, 1:])]
    assert [one["logprob"] for one in scored] == pytest.approx(right, abs=1e-4)
    assert [one["top"][0][0] for one in scored] == table[:-1].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--n", "2", "--json"), "--n 2: it requires a temperature above 0"),
        (("--n", "0", "--json"), "--n 0: it must be from 1 to 1024"),
        (("--n", "2", *SAMPLED), "--n above 1 requires --json"),
        (("--n", "9" * 12, *SAMPLED, "--json"), "9" * 12 + ": it must be from 1 to 1024"),
        (("--n", "2", *SAMPLED, "--json", "--rows", "0"), "--rows 0: it must be at least 1"),
        (("--prompt-logprobs",), "--prompt-logprobs requires --json"),
        (("--prompt-logprobs", "--json", "--load-cache", "none"), "--prompt-logprobs cannot be used with --save-cache"),
        (("--n", "2", *SAMPLED, "--json", "--seed", 2**32 - 1), "--seed 4294967296: it must be from 0 to 4294967295"),
    ],
)
def test_what_could_not_take_effect_is_refused(checkpoint, capsys, options, words):
    status, out, err = run(checkpoint, capsys, "--prompt", "x", *options)
    assert status == 2 and words in err and err.count("\n") == 1 and out == ""

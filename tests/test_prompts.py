"""Files of prompts are answered side by side, each line by its own options, and resumed."""

import json

import pytest

import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.llama_checkpoint(tmp_path_factory.mktemp("prompts"))


@pytest.fixture
def run(checkpoint, tmp_path, capsys):
    """Writes the lines to a file and answers it; returns status, answers in the prompts' order, standard error."""
    import treering

    def run(*lines, options=("--max-new-tokens", "5")):
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "answers")]
        status = treering.main(["generate", str(checkpoint), *files, *options])
        answers = (tmp_path / "answers").read_text().splitlines() if (tmp_path / "answers").exists() else []
        return status, sorted(map(json.loads, answers), key=lambda one: one["index"]), capsys.readouterr().err

    return run


def test_files_of_prompts_are_answered_and_resumed(checkpoint, tmp_path, capsys):
    import treering

    prompts = tmp_path / "prompts.jsonl"
    entries = [{"prompt": text} for text in tiny.CORPUS] + [{"messages": [{"role": "user", "content": "hello"}]}]
    prompts.write_text("\n".join(map(json.dumps, entries)))
    whole = tmp_path / "whole.jsonl"
    command = ["generate", str(checkpoint), "--prompts", str(prompts), "--max-new-tokens", "4", "--rows", "3"]
    assert treering.main([*command, "--output", str(whole)]) == 0
    lines = sorted(whole.read_text().splitlines(), key=lambda line: json.loads(line)["index"])
    assert [json.loads(line)["index"] for line in lines] == list(range(5))
    assert all(len(json.loads(line)["tokens"]) <= 4 for line in lines)

    broken = tmp_path / "broken.jsonl"
    broken.write_text(lines[0] + "\n" + lines[1] + "\n" + lines[2][:20])
    assert treering.main([*command, "--output", str(broken)]) == 0
    again = sorted(broken.read_text().splitlines(), key=lambda line: json.loads(line)["index"])
    assert again == lines
    assert treering.main([*command, "--output", str(broken)]) == 0
    assert sorted(broken.read_text().splitlines()) == sorted(again)

    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{"promt": "y"}\n')
    capsys.readouterr()
    bad = ["generate", str(checkpoint), "--prompts", str(tmp_path / "bad.jsonl"), "--output", str(tmp_path / "new")]
    assert treering.main(bad) == 2 and "line 2" in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "z"}\n')
    command[3] = str(other)
    assert treering.main([*command, "--output", str(whole)]) == 2 and "other prompts" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    command[3] = str(prompts)
    changed = [*command, "--output", str(whole), "--temperature", "1"]
    assert treering.main(changed) == 2 and "other options" in capsys.readouterr().err
    assert sorted(whole.read_text().splitlines()) == sorted(again)


def test_lines_ask_for_as_many_answers_as_they_say(run):
    sampled = ("--max-new-tokens", "5", "--temperature", "1", "--rows", "2")
    status, (one, two), _ = run({"prompt": "one"}, {"prompt": "two", "n": 2}, options=sampled)
    assert status == 0 and "answers" not in one and len(one["tokens"]) == 5
    assert len(two["answers"]) == 2 and two["answers"][0]["tokens"] != two["answers"][1]["tokens"]
    assert two["prompt_tokens"] > 1 and "prompt_tokens" not in two["answers"][0]
    # As the file stands, all is done; with another number of answers it answers other questions.
    assert "answers all 2 prompts already" in run({"prompt": "one"}, {"prompt": "two", "n": 2}, options=sampled)[2]
    status, _, err = run({"prompt": "one"}, {"prompt": "two", "n": 3}, options=sampled)
    assert status == 2 and "other options" in err


def test_a_line_is_answered_by_its_own_options_as_it_would_be_alone(checkpoint, run, capsys):
    import treering

    text = "The capital of France"
    own = {"temperature": 1, "seed": 7, "top_k": 9, "max_new_tokens": 3, "logprobs": 1, "stop": ["\0"]}
    status, (plain, sampled), err = run({"id": None, "prompt": text}, {"id": ["b", 2], "prompt": text, **own})
    assert status == 0, err
    assert plain["id"] is None and sampled["id"] == ["b", 2]
    assert len(plain["tokens"]) == 5 and "logprobs" not in plain and len(sampled["logprobs"]) == 3
    options = ["--temperature", "1", "--seed", "7", "--top-k", "9", "--max-new-tokens", "3"]
    assert treering.main(["generate", str(checkpoint), "--prompt", text, "--json", *options]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert (alone["tokens"], alone["text"]) == (sampled["tokens"], sampled["text"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            {"max_tokens": 5},
            '"max_tokens": it would have no effect (works: id, max_new_tokens, stop, ',
        ),
        ({"checkpoint": "x"}, '"checkpoint": it would have no effect'),
        ({"n": 0}, '"n" 0: it must be from 1 to 1024'),
        ({"n": 2}, '"n" 2: it requires a temperature above 0'),
        ({"n": "2"}, '"n" "2": it must be a whole number'),
        ({"top_k": 1.5}, '"top_k" 1.5: it must be a whole number'),
        ({"temperature": True}, '"temperature" true: it must be a number'),
        ({"temperature": float("nan")}, '"temperature" NaN: it must be a number'),
        ({"temperature": 10**400}, '"temperature" 1000'),
        ({"temperature": -1}, '"temperature" -1.0: it must be from 0'),
        ({"seed": 3}, '"seed" 3: it requires a temperature above 0'),
        ({"stop": "end"}, '"stop" "end": it must be any number of values, each a text'),
        ({"stop": [""]}, '"stop": an empty string would end every text at once'),
        ({"max_new_tokens": -1}, '"max_new_tokens" -1: it must be at least 0'),
        ({"max_new_tokens": None}, '"max_new_tokens" null: it must be a whole number'),
        ({"logprobs": 99}, '"logprobs" 99: it must be from 0 to 20'),
        ({"prompt_logprobs": 1}, '"prompt_logprobs" 1: it must be true or false'),
    ],
)
def test_an_option_of_a_line_that_cannot_be_honoured_is_told_with_its_number(run, line, said):
    status, answers, err = run({"prompt": "x"}, {"prompt": "y", **line})
    assert status == 2 and not answers
    assert "prompts.jsonl, line 2: " in err and said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    [
        '{"my": "only copy"}',
        '{"my": "only copy"}\n',
        "x",
        '{"index": 0}\n',
        '{"index": 0, "my": "only copy"}',
        '{"index": "0", "request_hash": ""}\n',
        '{"index": 0.0, "request_hash": ""}\n',
        "[" * 100_000 + "\n",
        '{"index": ' + "9" * 5000 + "}\n",
    ],
)
def test_an_output_that_holds_anything_else_is_kept(checkpoint, tmp_path, capsys, text):
    import treering

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "mine.json").write_text(text)
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "mine.json")]
    assert treering.main(["generate", str(checkpoint), *files]) == 2
    assert "is not a file of answers: choose another --output" in capsys.readouterr().err
    assert (tmp_path / "mine.json").read_text() == text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "\xff"}', "can't decode byte 0xff"),
        (b'{"prompt": ""}', '"prompt" "": it must be a string of at least one character'),
        (b'{"prompt": "\\ud800"}', "is not a character"),
        (b'{"prompt": "x", "messages": []}', "it must have either prompt or messages"),
        (b'{"messages": []}', '"messages" []: it must be a list of at least one message'),
        (
            b'{"messages": [{"role": "user"}]}',
            '"messages" [{"role": "user"}]: it must be a list of at least one message',
        ),
        (b"{", "it is not JSON"),
        (b'{"prompt": "x", "n": 1, "prompt": "y"}', '"prompt": it is given 2 times'),
        (b"[" * 100_000, "too deep"),
        (b'{"prompt": "x", "id": [1e999]}', '"id": JSON has no NaN and no infinity'),
    ],
)
def test_a_line_that_is_no_prompt_is_told_with_its_number(checkpoint, tmp_path, capsys, line, said):
    import treering

    (tmp_path / "prompts.jsonl").write_bytes(b'{"prompt": "x"}\n\n' + line + b"\n")
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "answers")]
    assert treering.main(["generate", str(checkpoint), *files]) == 2
    err = capsys.readouterr().err
    assert "prompts.jsonl, line 3: " in err and said in err and not (tmp_path / "answers").exists()


def test_a_broken_off_answer_stays_until_it_can_be_made_again(checkpoint, run, tmp_path):
    import treering

    whole = run({"prompt": "x"}, {"prompt": "y"})[1]
    cut = (tmp_path / "answers").read_text()[:-9]
    (tmp_path / "answers").write_text(cut)
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "answers")]
    assert treering.main(["generate", str(checkpoint), *files, "--max-new-tokens", "5", "--mesh.context", "3"]) == 2
    assert (tmp_path / "answers").read_text() == cut
    assert run({"prompt": "x"}, {"prompt": "y"})[1] == whole


def test_two_processes_do_not_write_one_output(run, tmp_path):
    from treering.models.checkpoint.atomic_folder import exclusive_lock

    (tmp_path / "answers").touch()
    with exclusive_lock(tmp_path / "answers", "it is ours"):
        status, answers, err = run({"prompt": "x"})
    assert status == 2 and not answers and "another process is writing" in err
    assert run({"prompt": "x"})[0] == 0


def test_answers_of_another_model_or_dtype_are_not_gone_on_with(checkpoint, run, tmp_path):
    import shutil

    import treering

    other = shutil.copytree(checkpoint, tmp_path / "other")
    record = json.loads((other / "model.json").read_text())
    (other / "model.json").write_text(json.dumps(record | {"fingerprint": "of other weights"}))
    assert run({"prompt": "x"})[0] == 0
    assert "another model" in run({"prompt": "x"}, options=("--max-new-tokens", "5", "--dtype", "bfloat16"))[2]
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "answers")]
    assert treering.main(["generate", str(other), *files, "--max-new-tokens", "5"]) == 2
    assert treering.main(["generate", str(checkpoint), *files, "--max-new-tokens", "5"]) == 0

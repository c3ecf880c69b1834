"""Conversations keep their cache, and files of prompts are answered side by side and resumed."""

import json

import pytest

import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.llama_checkpoint(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def engine(checkpoint, mesh):
    from configs.precision import Precision
    from infer.engine import Engine
    from layers.sharding import Plan
    from models.checkpoint import load_model

    plan = Plan(mesh(context=2), "decode")
    return Engine(load_model(checkpoint, plan, "float32"), plan, Precision(), batch=1, capacity=256)


def conversation(engine, checkpoint, **options):
    from configs.sampling import RequestConfig
    from infer.chat import Conversation
    from infer.scheduler import Scheduler
    from models.tokenizer import Tokenizer

    return Conversation(Scheduler(engine), Tokenizer.load(checkpoint), RequestConfig(**options))


def test_turns_read_only_what_is_new_and_answer_as_if_read_whole(engine, checkpoint):
    """The second answer equals that of a fresh row; the cache's rows were not read again."""
    from infer.answer import Answer
    from infer.scheduler import Scheduler

    talk = conversation(engine, checkpoint, max_new_tokens=6)
    turns = ["The capital of France", "Rings of a tree", "tabs and spaces"]
    appended = []
    append = engine.append_program

    def counting(rows, chunk, **options):
        program = append(rows, chunk, **options)

        def run(model, state, index, tokens, count):
            appended.append(int(count.sum()))
            return program(model, state, index, tokens, count)

        return run

    for turn in turns:
        before = len(talk.messages)
        engine.append_program = counting
        appended.clear()
        held = len(talk._session.tokens)
        said = "".join(talk.reply(turn))
        engine.append_program = append
        assert talk.messages[-1] == {"role": "assistant", "content": said}
        prompt = talk.tokenizer.encode_chat(talk.messages[: before + 1])
        fresh, answer = Scheduler(engine), Answer(talk.tokenizer, talk.request, 0)
        fresh.submit(prompt, talk.request, end_ids=talk.tokenizer.end_ids)
        for event in fresh.run():
            answer.follow(event, fresh)
        assert said == answer.text
        # Random weights may answer in bytes that do not encode to themselves; then the tail is read again.
        assert sum(appended) <= len(prompt) - (held > 0)
    talk.reset()
    assert talk.messages == [] and talk.scheduler.pages.free(0) == engine.group_pages


@pytest.mark.smoke
def test_an_answer_broken_off_leaves_a_conversation_that_goes_on(engine, checkpoint):
    talk = conversation(engine, checkpoint, max_new_tokens=30)
    reply = talk.reply("The year is")
    next(reply)
    reply.close()
    assert talk.messages[-1]["role"] == "assistant" and talk.scheduler.is_idle
    assert "".join(talk.reply("and then")) == talk.messages[-1]["content"]


def test_a_conversation_that_outgrows_the_cache_is_refused_and_kept(engine, checkpoint, tmp_path, capsys):
    from infer.chat import obey_or_reply

    talk = conversation(engine, checkpoint, max_new_tokens=2)
    obey_or_reply(talk, "hello")
    kept = list(talk.messages)
    obey_or_reply(talk, "x" * 600)
    assert "256 fit: /reset" in capsys.readouterr().err and talk.messages == kept
    obey_or_reply(talk, f"/save {tmp_path / 'talk.json'}")
    assert json.loads((tmp_path / "talk.json").read_text()) == kept
    obey_or_reply(talk, f"/save {tmp_path / 'talk.json'}")
    obey_or_reply(talk, "/what")
    said = capsys.readouterr().err
    assert "exists" in said and "unknown command /what" in said


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
    assert treering.main(changed) == 2 and "by other options" in capsys.readouterr().err
    assert sorted(whole.read_text().splitlines()) == sorted(again)


@pytest.mark.parametrize("text", ['{"my": "only copy"}', '{"my": "only copy"}\n', "x", '{"index": 0}\n'])
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
        (b'{"prompt": ""}', "a text has at least one character"),
        (b'{"prompt": "\\ud800"}', "is no character"),
        (b'{"prompt": "x", "messages": []}', "it has not one of prompt and messages"),
        (b'{"messages": []}', "its messages are []"),
        (b'{"messages": [{"role": "user"}]}', "its messages are [{'role': 'user'}]"),
        (b"{", "it is no JSON"),
    ],
)
def test_a_line_that_is_no_prompt_is_told_with_its_number(checkpoint, tmp_path, capsys, line, said):
    import treering

    (tmp_path / "prompts.jsonl").write_bytes(b'{"prompt": "x"}\n\n' + line + b"\n")
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "answers")]
    assert treering.main(["generate", str(checkpoint), *files]) == 2
    err = capsys.readouterr().err
    assert "prompts.jsonl line 3: " in err and said in err and not (tmp_path / "answers").exists()

"""Conversations keep their cache."""

import json

import pytest

import tiny
from test_engine import counted


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.llama_checkpoint(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def engine(checkpoint, mesh):
    from treering.configs.precision import Precision
    from treering.infer.engine import Engine
    from treering.layers.parallel.sharding import Plan
    from treering.models.checkpoint.model import load_model

    plan = Plan(mesh(context=2), "decode")
    return Engine(load_model(checkpoint, plan, "float32"), plan, Precision(), batch=1, capacity=256)


def conversation(engine, checkpoint, **options):
    from treering.configs.sampling import RequestConfig
    from treering.infer.scheduler import Scheduler
    from treering.infer.text.chat import Conversation
    from treering.models.tokenizer import Tokenizer

    return Conversation(Scheduler(engine), Tokenizer.load(checkpoint), RequestConfig(**options))


def test_turns_read_only_what_is_new_and_answer_as_if_read_whole(engine, checkpoint):
    """The second answer equals that of a fresh row; the cache's rows were not read again."""
    from treering.infer.scheduler import Scheduler
    from treering.infer.text.answer import Answer

    talk = conversation(engine, checkpoint, max_new_tokens=6)
    turns = ["The capital of France", "Rings of a tree", "tabs and spaces"]
    for turn in turns:
        before = len(talk.messages)
        held = len(talk._session.tokens)
        with counted(engine) as appended:
            said = "".join(talk.reply(turn))
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
    from treering.infer.commands.chat import obey_or_reply

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

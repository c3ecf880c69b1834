"""Files that earlier versions wrote: a run with a checkpoint, and a saved cache, go on as if nothing had changed.

`data/before_rooms.tar.gz` was written at commit 7355dd7, before parts of a model, options and files were renamed: a run
of a tiny Gemma 3 with a whole period of blocks and a part of one, stopped at step 3 of 6; a cache saved with its
weights; and in expected.json the losses of all six steps, and what `treering generate` answered.
"""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

import treering

CHECKPOINT = "run/checkpoints/3/model"


@pytest.fixture
def expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the earlier version found; the folder that holds its files is the working directory."""
    with tarfile.open(Path(__file__).parent / "data" / "before_rooms.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return json.loads(Path("expected.json").read_text())


def generate(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    made = ("--max-new-tokens", "8", "--json", "--logprobs", "2", "--mesh.context", "2", "--mesh.data", "4")
    assert treering.main(["generate", CHECKPOINT, *options, *made]) == 0
    return json.loads(capsys.readouterr().out)


def same(found: dict[str, Any], right: dict[str, Any]) -> None:
    for name in ("text", "tokens", "prompt_tokens", "finish_reason"):
        assert found[name] == right[name]
    for one, two in zip(found["logprobs"], right["logprobs"], strict=True):
        assert one["logprob"] == pytest.approx(two["logprob"], abs=1e-5)


@pytest.mark.long
def test_an_earlier_checkpoint_answers_as_it_did(expected: dict[str, Any], capsys) -> None:
    same(generate(capsys, "--prompt", "ring tree bark leaf"), expected["first"])


@pytest.mark.long
def test_an_earlier_cache_is_asked_again(expected: dict[str, Any], capsys) -> None:
    same(generate(capsys, "--load-cache", "cache.saved", "--prompt", " root sap"), expected["second"])


def test_an_earlier_run_resumes(expected: dict[str, Any]) -> None:
    """Its config.json names fields by their earlier names, its weights and optimizer parts of the model by theirs."""
    from treering.configs.data import DataConfig, Source
    from treering.configs.gemma import Gemma3Config
    from treering.configs.mesh import MeshConfig
    from treering.configs.precision import Precision
    from treering.configs.rope import DefaultRope
    from treering.configs.run import CheckpointConfig, EvaluateConfig, RunConfig
    from treering.configs.train import OptimizerConfig, ScheduleConfig, StepConfig
    from treering.train.run.loop import train

    config = RunConfig(
        folder="run",
        model=Gemma3Config(
            **{"vocab": 300, "embed": 16, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 16},
            **{"context_length": 64, "norm_eps": 1e-6, "tie_embeddings": True, "rope": DefaultRope(theta=1e6)},
            **{"window": 7, "period": 2, "local_theta": 1e4, "query_scalar": 8},
        ),
        data=DataConfig(
            sources=(Source(path="train.jsonl"),),
            tokenizer="bytes",
            window=32,
            batch=4,
            block_windows=8,
            cache="cache",
        ),
        steps=6,
        optimizer=OptimizerConfig(learning_rate=3e-3, weight_decay=0.1, schedule=ScheduleConfig(warmup_steps=2)),
        step=StepConfig(precision=Precision()),
        mesh=MeshConfig(fsdp=2, context=4),
        checkpoint=CheckpointConfig(every=100),
        evaluate=EvaluateConfig(every=100),
    )
    assert train(config).step == 6
    losses = [json.loads(line)["loss"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert losses == pytest.approx(expected["losses"], abs=1e-5)

"""Checkpoints: saved on one mesh and restored on another, and everything that is not a checkpoint."""

import json
import logging
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from treering.configs.llama import LLAMA_3_2_1B_CUT, TINY
from treering.configs.model import ModelConfig
from treering.layers.parallel.sharding import Plan
from treering.models.checkpoint.arrays import DTYPES
from treering.models.checkpoint.hashing import hash_array, hash_arrays
from treering.models.checkpoint.model import (
    abstract_model,
    load_model,
    named_leaves,
    read_record,
    save_model,
)
from treering.models.checkpoint.record import read_config
from treering.models.transformer import Stacked, Transformer, unroll

SMALL = replace(TINY, heads=8, kv_heads=4, vocab=64, mlp=64)
"""Dims that eight devices divide."""


def random_model(config: ModelConfig, plan: Plan, dtype: str = "float32") -> Transformer:
    rng = np.random.default_rng(0)
    shapes, static = eqx.partition(abstract_model(config), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    arrays = jax.tree.map(
        lambda leaf, sharding: jax.device_put(rng.normal(size=leaf.shape).astype(DTYPES[dtype]), sharding),
        shapes,
        plan.shardings(shapes, "parameters"),
    )
    return eqx.combine(arrays, static)


def equal(first: Any, second: Any) -> bool:
    ours, theirs = named_leaves(first), named_leaves(second)
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and np.array_equal(np.asarray(ours[name]), np.asarray(theirs[name]))
        for name in ours
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, mesh: Callable[..., Mesh]) -> tuple[Path, Transformer]:
    """A checkpoint written from eight devices, and the model in it."""
    model = random_model(SMALL, Plan(mesh(fsdp=2, context=2, tensor=2), "train"))
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    save_model(path, model, source={"kind": "test"})
    return path, model


@pytest.mark.smoke
@pytest.mark.parametrize("table", ["train", "decode"])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"context": 8}, {"fsdp": 4, "tensor": 2}, {"context": 4, "tensor": 2}, {"data": 2, "tensor": 4}],
    ids=str,
)
def test_any_mesh_restores_what_another_saved(
    saved: tuple[Path, Transformer], mesh: Callable[..., Mesh], table: Any, sizes: dict[str, int]
) -> None:
    path, model = saved
    plan = Plan(mesh(**sizes), table)
    restored = load_model(path, plan)
    assert equal(model, restored)
    assert restored.config == SMALL
    arrays = eqx.filter(restored, eqx.is_array)
    same = jax.tree.map(
        lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim),
        arrays,
        plan.shardings(arrays, "parameters"),
    )
    assert all(jax.tree.leaves(same))


def test_a_device_holds_its_share(saved: tuple[Path, Transformer], mesh: Callable[..., Mesh]) -> None:
    restored = load_model(saved[0], Plan(mesh(fsdp=8), "train"))
    table = named_leaves(restored)["blocks.places.0.mlp.gate.weight"]
    assert {shard.data.nbytes for shard in table.addressable_shards} == {table.nbytes // 8}


def test_dtypes_are_cast_only_when_asked(tmp_path: Path, mesh: Callable[..., Mesh]) -> None:
    plan = Plan(mesh(), "train")
    model = random_model(SMALL, plan, "bfloat16")
    # A norm kept in float32, as some checkpoints have it.
    model = eqx.tree_at(lambda m: m.norm.weight, model, replace_fn=lambda w: w.astype("float32") * 1.001)
    save_model(tmp_path / "checkpoint", model, source={})
    assert read_record(tmp_path / "checkpoint").dtype == "bfloat16"
    assert equal(load_model(tmp_path / "checkpoint", plan), model)
    cast = named_leaves(load_model(tmp_path / "checkpoint", plan, "float32"))
    assert {str(leaf.dtype) for leaf in cast.values()} == {"float32"}
    assert np.array_equal(cast["embed.table"], np.asarray(model.embed.table.astype("float32")))


def test_every_kind_of_config_comes_back(tmp_path: Path, mesh: Callable[..., Mesh]) -> None:
    config = replace(LLAMA_3_2_1B_CUT, embed=64, heads=2, kv_heads=1, head_dim=32, mlp=32, vocab=32)
    save_model(tmp_path / "checkpoint", random_model(config, Plan(mesh(), "train")), source={})
    assert read_config(tmp_path / "checkpoint") == config


def test_the_fingerprint_tells_weights_apart(tmp_path: Path, mesh: Callable[..., Mesh]) -> None:
    one, eight = Plan(mesh(), "train"), Plan(mesh(fsdp=2, context=2, tensor=2), "train")
    model = random_model(SMALL, one)
    changed = eqx.tree_at(lambda m: m.norm.weight, model, replace_fn=lambda w: w.at[3].set(w[3] * (1 + 2**-23)))
    for name, each in (("a", model), ("b", random_model(SMALL, eight)), ("c", changed)):
        save_model(tmp_path / name, each, source={"name": name})
    a, b, c = (read_record(tmp_path / name).fingerprint for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_hashes_do_not_depend_on_the_kind_of_array(dtype: str, mesh: Callable[..., Mesh]) -> None:
    array = np.random.default_rng(0).normal(size=(8, 3, 5)).astype(DTYPES[dtype])
    sharded = jax.device_put(
        array, Plan(mesh(fsdp=8), "train").sharding("embed layers layers", (8, 3, 5), "parameters")
    )
    assert len(sharded.addressable_shards) == 8 and sharded.addressable_shards[0].data.shape == (1, 3, 5)
    assert hash_arrays({"one": jax.numpy.asarray(array), "eight": sharded}) == dict.fromkeys(
        ["one", "eight"], hash_array(array)
    )
    swapped = array.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert len({hash_array(array), hash_array(swapped), hash_array(array.transpose(0, 2, 1)), hash_array(-array)}) == 4


def test_an_unrolled_model_is_not_saved(saved: tuple[Path, Transformer], tmp_path: Path) -> None:
    assert isinstance(saved[1].blocks, Stacked)
    model = eqx.tree_at(lambda m: m.blocks, saved[1], unroll(saved[1].blocks))
    with pytest.raises(ValueError, match="stacked"):
        save_model(tmp_path / "checkpoint", model, source={})
    assert not any(tmp_path.iterdir())


def test_a_destination_is_replaced_only_when_asked(saved: tuple[Path, Transformer], tmp_path: Path) -> None:
    path, model = tmp_path / "checkpoint", saved[1]
    shutil.copytree(saved[0], path)
    with pytest.raises(ValueError, match="exists.*--overwrite"):
        save_model(path, model, source={"kind": "second"})
    save_model(path, model, source={"kind": "second"}, overwrite=True)
    assert read_record(path).source == {"kind": "second"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not a checkpoint, so"):
        save_model(tmp_path / "precious", model, source={}, overwrite=True)
    assert (tmp_path / "precious" / "thesis.txt").exists()


def test_a_save_that_breaks_off_leaves_nothing_that_loads(
    saved: tuple[Path, Transformer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("treering.models.checkpoint.model.hash_arrays", stop)
    with pytest.raises(KeyboardInterrupt):
        save_model(tmp_path / "checkpoint", saved[1], source={})
    monkeypatch.undo()
    (left,) = tmp_path.iterdir()
    with pytest.raises(ValueError, match="unfinished"):
        read_config(left)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_config(tmp_path / "checkpoint")
    save_model(tmp_path / "checkpoint", saved[1], source={})
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def not_a_checkpoint(kind: str, path: Path) -> None:
    if kind == "file":
        path.write_text("x")
    elif kind != "missing":
        path.mkdir()
    if kind == "hugging face":
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_bytes(b"")
    elif kind == "gguf":
        (path / "model.gguf").write_bytes(b"GGUF")
    elif kind == "other":
        (path / "notes.txt").write_text("x")


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("missing", FileNotFoundError, "does not exist"),
        ("empty", ValueError, "empty folder"),
        ("hugging face", ValueError, "treering convert .*thing DST"),
        ("gguf", ValueError, "treering convert .*model.gguf DST"),
        ("file", ValueError, "is a file"),
        ("other", ValueError, "is not a checkpoint: it lacks model.json"),
    ],
)
def test_what_is_no_checkpoint_is_told(tmp_path: Path, kind: str, error: type[Exception], message: str) -> None:
    not_a_checkpoint(kind, tmp_path / "thing")
    with pytest.raises(error, match=message) as raised:
        read_config(tmp_path / "thing")
    assert "\n" not in str(raised.value) and str(tmp_path / "thing") in str(raised.value)


def changed_record(path: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(path, tmp_path / "changed")
    record = json.loads((path / "model.json").read_text())
    change(record)
    (tmp_path / "changed" / "model.json").write_text(json.dumps(record))
    return tmp_path / "changed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(format=2), r'model.json: "format" 2: this version does not read it \(works: 1\)'),
        (lambda record: record.update(family="falcon"), '"family" falcon: it is not known here.*works: .*llama'),
        (lambda record: record.update(transforms=["int8"]), '"transforms" .*int8.*: this version knows none'),
        (lambda record: record["config"].pop("heads"), "does not describe a model.*heads"),
        (lambda record: record["config"].update(colour="red"), "does not describe a model.*colour"),
        (lambda record: record["config"]["rope"].update(kind="spiral"), "does not describe a model.*spiral"),
        (
            lambda record: record["config"].update(kv_heads=3),
            'model.json: "kv_heads" 3: it must divide',
        ),
        (lambda record: record.pop("format"), "damaged"),
    ],
)
def test_a_changed_record_is_refused(
    saved: tuple[Path, Transformer], tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(changed_record(saved[0], tmp_path, change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 3}, r"blocks\.places\.0\.attention\.q\.weight has shape \(2, .*instead of \(3,"),
        ({"vocab": 65}, r"embed\.table has shape"),
        ({"tie_embeddings": True}, r"unexpected output\.weight"),
    ],
)
def test_weights_of_another_architecture_are_refused(
    saved: tuple[Path, Transformer], tmp_path: Path, mesh: Callable[..., Mesh], change: dict[str, Any], message: str
) -> None:
    path = changed_record(saved[0], tmp_path, lambda record: record["config"].update(change))
    with pytest.raises(ValueError, match=message):
        load_model(path, Plan(mesh(), "decode"))


def test_a_missing_parameter_is_named(
    saved: tuple[Path, Transformer], tmp_path: Path, mesh: Callable[..., Mesh]
) -> None:
    shutil.copytree(saved[0], tmp_path / "checkpoint")
    shutil.rmtree(tmp_path / "checkpoint" / "weights" / "norm.weight")
    with pytest.raises(ValueError, match=r"norm\.weight"):
        load_model(tmp_path / "checkpoint", Plan(mesh(), "decode"))


def test_a_mesh_that_does_not_divide_is_refused(saved: tuple[Path, Transformer], mesh: Callable[..., Mesh]) -> None:
    with pytest.raises(ValueError, match=r"mesh.tensor 8: it must divide kv_heads 4 \(works: 1, 2, 4\)"):
        load_model(saved[0], Plan(mesh(tensor=8), "decode"))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 100_000])
def test_a_model_json_that_is_no_text_or_no_end_of_brackets_is_told_by_name(tmp_path, content):
    from treering.models.checkpoint.record import read_record

    (tmp_path / "weights").mkdir()
    (tmp_path / "model.json").write_bytes(content)
    with pytest.raises(ValueError, match="model.json is damaged"):
        read_record(tmp_path)


def test_the_quiet_of_a_command_ends_with_it_and_the_library_has_none() -> None:
    from treering.models.checkpoint.arrays import array_handler
    from treering.models.checkpoint.quiet import quiet_orbax

    def state() -> tuple[Any, ...]:
        levels = [logging.getLogger(name).level for name in ("absl", "asyncio")]
        return (*levels, list(warnings.filters), sys.unraisablehook)

    before = state()
    array_handler()
    assert state() == before
    with pytest.raises(KeyboardInterrupt), quiet_orbax():
        assert not any(logging.getLogger(name).isEnabledFor(logging.ERROR) for name in ("absl", "asyncio"))
        assert warnings.filters[0][:2] == ("ignore", re.compile("coroutine .* was never awaited", re.IGNORECASE))
        raise KeyboardInterrupt
    assert state() == before

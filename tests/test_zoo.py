"""The zoo: sizes as published, and every one of them builds and shards."""

import math

import jax
import pytest

import treering
from treering.configs.zoo import ZOO
from treering.models.audit.check import MESHES, TABLES, abstract_plan
from treering.models.audit.zoo import parameter_count
from treering.models.checkpoint.model import abstract_model, named_leaves
from treering.models.transformer import check_mesh

# As the files of the published weights add up, tied tables counted once.
PARAMETERS = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "code-llama-7b": 6_738_546_688,
    "code-llama-7b-python": 6_738_415_616,
    "code-llama-13b": 13_016_028_160,
    "code-llama-13b-python": 13_015_864_320,
    "code-llama-34b": 33_743_970_304,
    "code-llama-70b": 68_976_910_336,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "lwm-text-128k": 6_738_415_616,
    "lwm-text-256k": 6_738_415_616,
    "lwm-text-512k": 6_738_415_616,
    "lwm-text-1m": 6_738_415_616,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.2": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    # The published 4,300,079,472, 12,187,325,040 and 27,432,406,640 without the vision tower's 416,866,032 and its
    # projection, 1152 x (embed + 1).
    "gemma-3-4b-text": 3_880_263_168,
    "gemma-3-12b-text": 11_766_034_176,
    "gemma-3-27b-text": 27_009_346_304,
}


@pytest.mark.smoke
def test_every_entry_has_its_published_number_of_parameters() -> None:
    assert ZOO.keys() == PARAMETERS.keys()
    assert {name: parameter_count(config) for name, config in ZOO.items()} == PARAMETERS


@pytest.mark.parametrize("name", ZOO)
def test_every_entry_builds_and_shards(name: str) -> None:
    config = ZOO[name]
    model = abstract_model(config)
    arrays = {path: leaf for path, leaf in named_leaves(model).items()}
    for sizes in MESHES:
        if any(getattr(config, dim) % sizes.get("tensor", 1) for dim in ("kv_heads", "heads", "mlp")):
            with pytest.raises(ValueError, match="mesh.tensor 2: it must divide"):
                check_mesh(config, abstract_plan(sizes, "train"))
            continue
        for table in TABLES:
            here = abstract_plan(sizes, table)
            check_mesh(config, here)
            shares = {
                path: math.prod(leaf.sharding.shard_shape(leaf.shape))
                for path, leaf in named_leaves(here.abstract(_shapes(model), "parameters")).items()
            }
            assert shares.keys() == arrays.keys()
            share = sum(shares.values()) / PARAMETERS[name]
            if table == "train":
                # What does not divide stays whole: small models on large meshes only.
                least = 1 / math.prod(sizes.get(axis, 1) for axis in ("fsdp", "context", "tensor"))
                assert least <= share <= 1.02 * least or config.embed < 2048, sizes


def _shapes(model):
    import equinox as eqx

    return eqx.filter(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert treering.main(["zoo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(ZOO)
    assert "llama-3.1-405b         405,853,388,800    131,072             516,096" in lines
    assert ZOO["llama-3.1-8b"].kv_bytes_per_token(2) == 131072


def test_names_that_share_a_config_family_keep_their_own_fields() -> None:
    assert ZOO["mistral-7b-v0.1"].window == 4096 and ZOO["mistral-7b-v0.2"].window is None
    assert ZOO["mistral-nemo-12b"].head_dim * ZOO["mistral-nemo-12b"].heads != ZOO["mistral-nemo-12b"].embed

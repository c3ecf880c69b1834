"""Settings for all tests, and the fixtures that many of them share.

JAX runs on eight simulated CPU devices. float64 is off; a test that needs it takes the fixture `x64`, or enters
`jax.enable_x64(True)` itself (as those must that run many examples of hypothesis).

The packages of this repository are imported inside fixtures: at this file's top they would come before the hook that
checks the shapes in their annotations.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Read when the libraries are imported or their backend starts. Subprocesses of tests inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Many tests compile the same programs, and the next run all of them.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
# Eight devices share few cores: on a busy machine one may keep the others waiting longer than XLA's 40 seconds.
os.environ["XLA_FLAGS"] = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600 " + os.environ.get("XLA_FLAGS", "")
)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

DEVICES = 8

jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# Examples compile: no deadline, and the same ones in each run.
hypothesis.settings.register_profile(
    "treering", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("treering")


# `bench` lies at the repository's root, which is on no path: there it would bring a second copy of our packages.
_bench = importlib.util.spec_from_file_location("bench", ROOT / "bench" / "__init__.py")
assert _bench is not None
sys.modules["bench"] = importlib.util.module_from_spec(_bench)


@pytest.fixture
def x64() -> Iterator[None]:
    """float64 and int64 for the length of one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Functions as users call them: without the checks of annotations that tests add."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def mesh() -> Callable[..., Mesh]:
    """`mesh(context=4, tensor=2)` is a mesh with those axis sizes over the first devices; other axes have size 1."""

    def make(*, data: int = 1, fsdp: int = 1, context: int = 1, tensor: int = 1) -> Mesh:
        shape = (data, fsdp, context, tensor)
        devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
        return Mesh(devices, ("data", "fsdp", "context", "tensor"), axis_types=(AxisType.Auto,) * 4)

    return make


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's GGUF file. The first test that asks downloads it into `.cache`; parallel ones wait for it."""
    from treering.infer import demo

    return demo.fetch(ROOT / ".cache")

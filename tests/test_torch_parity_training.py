"""Three steps of training equal three steps of a torch loop around transformers' Llama."""

import numpy as np
import pytest

import tiny
import training
from treering.configs.llama import TINY
from treering.configs.precision import DType, Precision
from treering.configs.train import OptimizerConfig, ScheduleConfig, StepConfig
from treering.models.families.registry import families

torch = pytest.importorskip("torch")

CONSTANT = ScheduleConfig(kind="constant")
SGD = OptimizerConfig(kind="sgd", learning_rate=1e-3, momentum=0.9, weight_decay=0.1, schedule=CONSTANT, clip_norm=None)
ADAMW = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, schedule=CONSTANT)


def torch_steps(
    optimizer: OptimizerConfig, steps: list[list], dtype: str
) -> tuple[dict[str, np.ndarray], list[float], list[float]]:
    """Parameters, losses and gradient norms of a torch loop that runs each document by itself."""
    torch.set_num_threads(1)
    model = tiny.torch_model().to(getattr(torch, dtype))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": optimizer.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if optimizer.kind == "sgd":
        update = torch.optim.SGD(groups, lr=optimizer.learning_rate, momentum=optimizer.momentum)
    else:
        betas = (optimizer.b1, optimizer.b2)
        update = torch.optim.AdamW(groups, lr=optimizer.learning_rate, betas=betas, eps=optimizer.eps)
    losses, norms = [], []
    for rows in steps:
        update.zero_grad()
        total, count = torch.zeros((), dtype=getattr(torch, dtype)), 0
        for tokens, prompt in (document for row in rows for document in row):
            logits = model(input_ids=torch.tensor(tokens)[None]).logits[0, :-1]
            labels = torch.tensor(tokens[1:]).long()
            labels[:prompt] = -100
            total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            count += int((labels >= 0).sum())
        (total / count).backward()
        losses.append(total.item() / count)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip_norm or np.inf).item())
        update.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}, losses, norms


def renamed(parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our parameters, layer by layer, under transformers' names."""
    found = {}
    for name, pattern in families()["llama"].names(TINY).items():
        if "{layer}" in pattern:
            found |= {pattern.format(layer=n): x for n, x in enumerate(parameters[name])}
        else:
            found[pattern] = parameters[name]
    return found


def assert_equal_steps(mesh, optimizer: OptimizerConfig, dtype: DType) -> None:
    """Packed rows here, documents one by one there: the same tokens."""
    steps = [training.packed_rows(seed) for seed in range(3)]
    theirs, losses, norms = torch_steps(optimizer, steps, dtype)
    step = StepConfig(precision=Precision(params=dtype, compute=dtype), loss_chunk=24)
    ours = training.run(training.train_plan(mesh()), optimizer=optimizer, step=step)
    assert np.allclose(ours.losses, losses, rtol=1e-5, atol=0)
    assert np.allclose(ours.norms, norms, rtol=1e-5, atol=0)
    assert min(norms) > (optimizer.clip_norm or 0), "nothing was clipped"
    start, found = tiny.tensors(), renamed(ours.parameters)
    assert found.keys() == theirs.keys()
    for name, x in theirs.items():
        error = found[name].reshape(x.shape) - x
        assert np.max(np.abs(error)) <= 1e-5, name
        # A rate of 1e-3 moves parameters by little: the way that they went is the same too.
        assert np.linalg.norm(error) <= 1e-4 * np.linalg.norm(x - start[name]), name


def test_sgd_with_momentum_and_decay_equals_torch(mesh):
    assert_equal_steps(mesh, SGD, "float32")


def test_clipped_adamw_with_decay_of_matrices_equals_torch(mesh, x64):
    """In float64: Adam divides a gradient by its own size, and float32 has few digits of the smallest ones."""
    assert_equal_steps(mesh, ADAMW, "float64")

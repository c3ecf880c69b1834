"""The demo model in transformers, from the GGUF file by a way of its own: the oracle for what ours generates."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HEADS, KV_HEADS = 9, 3


def torch_model(path: Path) -> Any:
    """SmolLM2-135M-Instruct in transformers, float32, from the dequantised tensors of the GGUF file."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {}
    for name in model.state_dict():
        array = stored[
            names.get_name(name, try_suffixes=(".weight",)) if name != "lm_head.weight" else "token_embd.weight"
        ]
        if "q_proj" in name or "k_proj" in name:
            array = half_split(array, HEADS if "q_proj" in name else KV_HEADS)
        weights[name] = torch.tensor(np.array(array, np.float32))
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    return model.eval()


def half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Interleaved rows 0, d/2, 1, ... of each head back in the order 0, 1, ..., d/2, ..."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """`count` greedy tokens, and by how much the best logit of each step led the second."""
    import torch

    tokens, gaps, cache = [], [], None
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(count):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            best = out.logits[0, -1].topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            ids = best.indices[None, :1]
    return tokens, gaps

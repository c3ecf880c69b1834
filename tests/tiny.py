"""Tiny models and tokenizers in the forms that other tools write, for tests.

Weights have a standard deviation of 0.3: with the usual 0.02 a wholly wrong rotary layout moves logits by 5e-3. There
are 8 heads and 2 key heads: neither 1, nor each other's quotient.
"""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

CORPUS = [
    "The capital of France is Paris. The year is 2024, and 12345 + 678 = 13023.",
    "Rings of a tree: one a year,   wide in wet years, narrow in dry ones.",
    "def ring(x):\n    return x + 1\n\n\tprint('tabs and  spaces')",
    "naïve café, Zürich, 你好世界, привет мир, 👍🏽 👩‍👩‍👧",
]

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tensors(config: Mapping[str, Any] = LLAMA, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors of a Llama or a Qwen under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    embed, mlp, heads, kv_heads = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    head_dim = config.get("head_dim", embed // heads)
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], embed), "model.norm.weight": (embed,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], embed)
    for layer in range(config["num_hidden_layers"]):
        inside = {
            "input_layernorm": (embed,),
            "post_attention_layernorm": (embed,),
            "self_attn.q_proj": (heads * head_dim, embed),
            "self_attn.k_proj": (kv_heads * head_dim, embed),
            "self_attn.v_proj": (kv_heads * head_dim, embed),
            "self_attn.o_proj": (embed, heads * head_dim),
            "mlp.gate_proj": (mlp, embed),
            "mlp.up_proj": (mlp, embed),
            "mlp.down_proj": (embed, mlp),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in inside.items()}
        if config["model_type"] == "qwen2":
            sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
            shapes |= {f"model.layers.{layer}.self_attn.{n}_proj.bias": (size * head_dim,) for n, size in sizes.items()}
        if config["model_type"] == "qwen3":
            shapes |= {f"model.layers.{layer}.self_attn.{name}_norm.weight": (head_dim,) for name in ("q", "k")}
    draws = {name: 0.3 * rng.normal(size=shape) for name, shape in shapes.items()}
    return {name: (draw + (draw.ndim == 1)).astype(np.float32) for name, draw in draws.items()}


def write_folder(
    folder: Path,
    config: Mapping[str, Any] = LLAMA,
    weights: Mapping[str, np.ndarray] | None = None,
    *,
    shards: list[list[str]] | None = None,
) -> Path:
    """A Hugging Face folder of `weights` (default: random ones); `shards` lists the tensors of each file."""
    weights = tensors(config) if weights is None else weights
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if shards is None:
        safetensors.numpy.save_file(dict(weights), folder / "model.safetensors", {"format": "pt"})
        return folder
    index = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        safetensors.numpy.save_file({name: weights[name] for name in names}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(names, file)
    total = sum(array.nbytes for array in weights.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def write_gguf(
    path: Path,
    config: Mapping[str, Any] = LLAMA,
    weights: Mapping[str, np.ndarray] | None = None,
    *,
    quantise: gguf.GGMLQuantizationType | None = None,
    metadata: Mapping[str, Any] | None = None,
    divisors: np.ndarray | None = None,
) -> Path:
    """The same as a GGUF file: a Llama's q and k rows interleaved, matrices in the type `quantise` (default: float32).

    `divisors` are the values of rope_freqs.weight.
    """
    weights = tensors(config) if weights is None else weights
    architecture = config["model_type"].removesuffix("_text")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    for key, value in (metadata or {}).items():
        add_value(writer, key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    for name, array in weights.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None
        if architecture == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        elif architecture != "llama":
            pass
        elif "q_proj" in name:
            array = interleave(array, config["num_attention_heads"])
        elif "k_proj" in name:
            array = interleave(array, config["num_key_value_heads"])
        if quantise is None or array.ndim == 1:
            writer.add_tensor(stored, array)
        else:
            writer.add_tensor(stored, gguf.quantize(array, quantise), raw_dtype=quantise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama.cpp, by its own formula: within a head 0, d/2, 1, d/2 + 1, ..."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_meta(
    folder: Path,
    config: Mapping[str, Any] = LLAMA,
    weights: Mapping[str, np.ndarray] | None = None,
    *,
    files: int = 1,
    embedding_rows: bool = True,
    **params: Any,
) -> Path:
    """The same as Meta writes it, cut into `files`; the embedding by rows, as in Llama 3, or by columns, as in Llama 2.

    `params` go into params.json. Arrays of bfloat16 are written as such.
    """
    import torch

    weights = tensors(config) if weights is None else weights
    folder.mkdir(parents=True, exist_ok=True)
    own = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": -1,
        "multiple_of": 32,
        "max_seq_len": config["max_position_embeddings"],
    }
    said = {key: value for key, value in (own | params).items() if value is not None}
    (folder / "params.json").write_text(json.dumps(said))
    names = {
        "embed_tokens": ("tok_embeddings", 0 if embedding_rows else 1),
        "lm_head": ("output", 0),
        "q_proj": ("attention.wq", 0),
        "k_proj": ("attention.wk", 0),
        "v_proj": ("attention.wv", 0),
        "o_proj": ("attention.wo", 1),
        "gate_proj": ("feed_forward.w1", 0),
        "down_proj": ("feed_forward.w2", 1),
        "up_proj": ("feed_forward.w3", 0),
        "input_layernorm": ("attention_norm", None),
        "post_attention_layernorm": ("ffn_norm", None),
        "norm": ("norm", None),
    }
    parts: list[dict[str, Any]] = [{} for _ in range(files)]
    for name, array in weights.items():
        words = name.split(".")
        theirs, cut = names[words[-2]]
        if words[-2] in ("q_proj", "k_proj"):
            heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}[words[-2]]
            array = interleave(array, config[heads])
        pieces = [array] * files if cut is None else np.split(array, files, axis=cut)
        prefix = f"layers.{words[2]}." if words[1] == "layers" else ""
        for part, piece in zip(parts, pieces, strict=True):
            bits = piece.view(np.int16) if piece.dtype.itemsize == 2 else piece
            tensor = torch.from_numpy(np.array(bits))
            part[f"{prefix}{theirs}.weight"] = tensor.view(getattr(torch, str(piece.dtype)))
    for number, part in enumerate(parts):
        torch.save(part | {"rope.freqs": torch.ones(4)}, folder / f"consolidated.{number:02}.pth")
    return folder


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """One metadata entry, in the type that llama.cpp uses for such a value."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE like GPT-2's and Llama 3's, trained on `CORPUS`, that puts <|begin|> before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    return tokenizer


def save_byte_level(folder: Path, *, template: str | None = TEMPLATE) -> None:
    """`byte_level_tokenizer` as a Hugging Face folder."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(),
        bos_token="<|begin|>",
        eos_token="<|end|>",
        chat_template=template,
    ).save_pretrained(folder)


def sentencepiece_model() -> bytes:
    """A SentencePiece BPE with byte tokens, like Llama 2's, trained on `CORPUS`."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS[:3] * 8 + CORPUS[3:]),
        model_writer=model,
        model_type="bpe",
        vocab_size=380,
        byte_fallback=True,
        character_coverage=0.98,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


def save_sentencepiece(folder: Path, *, template: str | None = None) -> None:
    """`sentencepiece_model` as a Hugging Face folder with tokenizer.model, as Llama 2 has it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))


def gguf_tokenizer_metadata(kind: str) -> dict[str, Any]:
    """The `tokenizer.*` metadata of a GGUF file: `byte_level_tokenizer` ("gpt2") or `sentencepiece_model` ("llama")."""
    if kind == "gpt2":
        raw = json.loads(byte_level_tokenizer().to_str())
        vocabulary = raw["model"]["vocab"]
        tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
        special = {token["content"] for token in raw["added_tokens"]}
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
            "tokenizer.ggml.merges": [" ".join(merge) for merge in raw["model"]["merges"]],
            "tokenizer.ggml.bos_token_id": vocabulary["<|begin|>"],
            "tokenizer.ggml.eos_token_id": vocabulary["<|end|>"],
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": TEMPLATE,
        }
    model = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    count = model.vocab_size()
    kinds = ((model.is_unknown, 2), (model.is_control, 3), (model.is_byte, 6))
    types = [next((kind for holds, kind in kinds if holds(i)), 1) for i in range(count)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": [model.get_score(i) for i in range(count)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }


def torch_model(config: Mapping[str, Any] = LLAMA, *, seed: int = 0) -> Any:
    """The same model in transformers, with the weights of `tensors`: the oracle."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).eval()
    weights = {name: torch.tensor(array) for name, array in tensors(config, seed=seed).items()}
    if config["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


def logits(model: Any, plan: Any, ids: np.ndarray) -> np.ndarray:
    """Logits `[batch seq vocab]` of our model, with attention computed from its definition."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from treering.layers.attention.dense import dense_attention
    from treering.layers.nn.attention import ForwardInfo

    def attend(q, k, v, *, mask, info, state, layer):
        return dense_attention(q, k, v, mask=mask, positions=info.positions, segments=info.segments), state

    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    info = ForwardInfo(positions=positions, segments=None, attend=attend, plan=plan)

    def forward(model, tokens, info):
        hidden, _ = model(tokens, info, dtype=jnp.dtype("float32"))
        return model.unembed(hidden, info)

    with jax.default_matmul_precision("highest"):
        return np.asarray(eqx.filter_jit(forward)(model, jnp.asarray(ids), info))


def llama_checkpoint(folder: Path) -> Path:
    """A converted Llama with a byte-level tokenizer, in `folder`."""
    from treering.models.conversion.convert import convert

    source = write_folder(folder / "hf", {**LLAMA, "vocab_size": 400})
    save_byte_level(source)
    convert(source, folder / "checkpoint")
    return folder / "checkpoint"

"""Makes a model that vLLM serves in seconds: a two-layer Llama with seeded random weights and a byte-level tokenizer.

Run by the engine environment's Python, which has `tokenizers`; the rest is the standard library. Usage: tiny_model.py
FOLDER. The same source gives the same bytes; a folder that exists is left as it is.
"""

import json
import math
import random
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

LAYERS = 2
HIDDEN = 64
HEADS = 2  # of 32: the smallest head that vLLM's attention kernel for CPU takes
FEED_FORWARD = 128
VOCABULARY = 4096
CONTEXT = 8192
SEED = 20250
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|tool|>{{ tools | tojson }}{{ eos_token }}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": FEED_FORWARD,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HIDDEN // HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": SPECIAL_TOKENS.index("<s>"),
    "eos_token_id": SPECIAL_TOKENS.index("</s>"),
}

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "model_max_length": CONTEXT,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of a Llama checkpoint by name; matrices are (outputs, inputs)."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{prefix}.self_attn.{name}.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (FEED_FORWARD, HIDDEN)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (FEED_FORWARD, HIDDEN)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, FEED_FORWARD)
        shapes[f"{prefix}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (HIDDEN,)
    return shapes


def weights(shape: tuple[int, ...], draw: random.Random) -> bytes:
    """Return one tensor as little-endian float32. Norms are one; matrices keep the variance of their input.

    So the logits spread by about one each, and the best token wins by far more than the rounding that differs between a
    cold and a cached prefill or between batch sizes.
    """
    size = math.prod(shape)
    if len(shape) == 1:
        values = [1.0] * size
    else:
        scale = 1 / math.sqrt(shape[1])
        values = [draw.gauss(0.0, scale) for _ in range(size)]
    return struct.pack(f"<{size}f", *values)


def write_safetensors(path: Path) -> None:
    """Write the safetensors format: header length (8 bytes, little-endian), JSON header, little-endian data."""
    draw = random.Random(SEED)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    blobs: list[bytes] = []
    offset = 0
    for name, shape in tensor_shapes().items():
        blob = weights(shape, draw)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (offset, offset + len(blob))}
        blobs.append(blob)
        offset += len(blob)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(blobs))


def sentences(count: int) -> Iterator[str]:
    """Return text in an invented language of a few thousand words, enough for every merge of the vocabulary."""
    draw = random.Random(SEED)
    syllables = [c + v + e for c in "bcdfghklmnprstvz" for v in "aeiou" for e in ("", "n", "r", "s")]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(5000)]
    for _ in range(count):
        yield " ".join(draw.choices(words, k=draw.randint(5, 20))).capitalize() + "."


def write_tokenizer(path: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer  # noqa: PLC0415

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        sentences(4000), vocab_size=VOCABULARY, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"tiny_model: the text gives {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}")
    tokenizer.save(str(path))


def make(folder: Path) -> None:
    """Write the model to `folder`, completely or not at all."""
    if folder.is_dir():
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_safetensors(partial / "model.safetensors")
    write_tokenizer(partial / "tokenizer.json")
    (partial / "config.json").write_text(json.dumps(CONFIG, indent=1))
    (partial / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=1))
    partial.rename(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))

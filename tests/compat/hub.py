"""A folder in the layout of the model hub's cache, in which every name that vLLM's tests ask for is a tiny model.

So the tests load tokenizers and adapters by the names that they know, and servers start under these names, offline.
"""

import json
import random
import shutil
import struct
from hashlib import sha256
from pathlib import Path

from tests.engine import tiny_model

MODELS = (
    "HuggingFaceH4/zephyr-7b-beta",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-8B",
    "facebook/opt-125m",
    "openai-community/gpt2",
)
ADAPTERS = ("charent/self_cognition_Alice", "typeof/zephyr-7b-beta-lora")
"""LoRA adapters of the models."""
REVISION = "0" * 40
CONTEXT = 32768
"""The longest of the contexts that the tests ask for is 18192 tokens."""
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens without which vLLM's parsers of reasoning and tool calls refuse a model."""
RANK = 8


def make_hub(model: Path) -> Path:
    """Return the folder, for the variable HF_HOME, beside that of the tiny model; rebuilt if its source has changed."""
    home = model.with_name(f"hub-{model.name}-{sha256(Path(__file__).read_bytes()).hexdigest()[:12]}")
    if not home.is_dir():
        partial = home.with_name(f"{home.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        for name in MODELS:
            copy_model(model, make_snapshot(partial, name))
        for name in ADAPTERS:
            write_adapter(make_snapshot(partial, name))
        partial.rename(home)
    return home


def snapshot(home: Path, name: str) -> Path:
    """Return the folder of a model's files."""
    return home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / REVISION


def make_snapshot(home: Path, name: str) -> Path:
    """Make the folder of a model's files, to which its main branch refers."""
    folder = snapshot(home, name)
    folder.mkdir(parents=True)
    references = folder.parents[1] / "refs"
    references.mkdir()
    (references / "main").write_text(REVISION)
    return folder


def copy_model(model: Path, folder: Path) -> None:
    (folder / "model.safetensors").symlink_to(model / "model.safetensors")
    for name, change in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        content = json.loads((model / name).read_text()) | {change: CONTEXT}
        (folder / name).write_text(json.dumps(content))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    put_markers(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def put_markers(tokenizer: dict[str, object]) -> None:
    """Replace the vocabulary's last tokens, which the last merges make, by the markers."""
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    assert isinstance(model, dict)
    assert isinstance(added, list)
    vocabulary: dict[str, int] = model["vocab"]
    last = sorted(vocabulary, key=vocabulary.__getitem__)[-len(MARKERS) :]
    model["merges"] = model["merges"][: -len(MARKERS)]
    for marker, replaced in zip(MARKERS, last, strict=True):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        added.append({"id": vocabulary.pop(replaced), "content": marker, **flags})


def write_adapter(folder: Path) -> None:
    """Write an adapter of the attention's queries, with seeded random weights."""
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    draw = random.Random(tiny_model.SEED)
    header: dict[str, object] = {}
    data = b""
    for layer in range(tiny_model.LAYERS):
        for part, shape in (("A", (RANK, tiny_model.HIDDEN)), ("B", (tiny_model.HIDDEN, RANK))):
            blob = tiny_model.weights(shape, draw)
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight"
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (len(data), len(data) + len(blob))}
            data += blob
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)

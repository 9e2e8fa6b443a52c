"""A folder in the layout of the model hub's cache, in which every name that vLLM's tests ask for is a tiny model.

So the tests load tokenizers and adapters by the names that they know, and servers start under these names, offline. The
tokenizer is trained on the tests' own files, so that their prompts have about as many tokens as with a real one.
"""

import json
import random
import shutil
import struct
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

from tests.engine import tiny_model
from tests.engine.environment import ROOT

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
VOCABULARY = 8192
"""The highest token that the tests name is 5000."""
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens without which vLLM's parsers of reasoning and tool calls refuse a model."""
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Some tests read the prompt as Qwen's template has it."""
TURNS = ("<|im_start|>", "<|im_end|>")
ANSWER_TOKENS = 300
"""A random model would write until the context is full. One name has no such limit: a test asks it for long answers."""
UNLIMITED = "Qwen/Qwen3-0.6B"
GREEDY: Mapping[str, float] = {"temperature": 0}
"""For calls that name no temperature, so that a test passes in every run or in none."""
RANK = 8


def make_hub(source: Path) -> Path:
    """Return the folder, for the variable HF_HOME, made if need be from the folder with vLLM's tests."""
    digest = sha256(Path(__file__).read_bytes() + Path(tiny_model.__file__).read_bytes()).hexdigest()[:12]
    home = ROOT / ".engine" / f"hub-{source.name}-{digest}"
    if not home.is_dir():
        partial = home.with_name(f"{home.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        write_model(partial / "model", source)
        for name in MODELS:
            folder = make_snapshot(partial, name)
            for file in (partial / "model").iterdir():
                (folder / file.name).symlink_to(Path("../../../../model", file.name))
            limit = {} if name == UNLIMITED else {"max_new_tokens": ANSWER_TOKENS}
            (folder / "generation_config.json").write_text(json.dumps({**GREEDY, **limit}))
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


def write_model(folder: Path, source: Path) -> None:
    """Write the model of tests/engine with another vocabulary and a longer context."""
    folder.mkdir(parents=True)
    config = {**tiny_model.CONFIG, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    texts = {**tiny_model.TOKENIZER_CONFIG, "model_max_length": CONTEXT, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    rows = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCABULARY, tiny_model.HIDDEN))
    write_tensors(folder / "model.safetensors", {**tiny_model.tensor_shapes(), **rows})
    write_tokenizer(folder / "tokenizer.json", source)


def write_tokenizer(file: Path, source: Path) -> None:
    tokenizer = ByteLevelBPETokenizer()
    names = [*tiny_model.SPECIAL_TOKENS, *TURNS, *MARKERS]
    tokenizer.train_from_iterator(texts_of(source), VOCABULARY, special_tokens=names, show_progress=False)
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] not in MARKERS  # a special token is left out of the text
    file.write_text(json.dumps(content))


def texts_of(source: Path) -> Iterator[str]:
    for file in sorted((source / "tests" / "entrypoints").rglob("*.py")):
        yield file.read_text()


def write_adapter(folder: Path) -> None:
    """Write an adapter of the attention's queries."""
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    parts = {"A": (RANK, tiny_model.HIDDEN), "B": (tiny_model.HIDDEN, RANK)}
    shapes = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight": shape
        for layer in range(tiny_model.LAYERS)
        for part, shape in parts.items()
    }
    write_tensors(folder / "adapter_model.safetensors", shapes)


def write_tensors(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write seeded random weights in the safetensors format."""
    draw = random.Random(tiny_model.SEED)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, shape in shapes.items():
        start = len(data)
        data += tiny_model.weights(shape, draw)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (start, len(data))}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)

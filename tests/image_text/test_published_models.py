"""Models of open_clip and transformers as scorers: their own scores, captions without an end token, unknown names."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from clip_fakes import evaluate, small_checkpoint
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional as F

from dino_sparo.image_text.evaluation.protocol import ROOT, named_source
from dino_sparo.image_text.evaluation.published import open_hugging_face, open_open_clip, tokens_of
from studies.drawn_sets import draw_sets

CAPTIONS = ["a red star left of a blue ring", "a blue star left of a red ring", "ring", "a red " * 9]
WORDS = ("a", "red", "star", "left", "of", "blue", "ring")
LENGTH = 13
ARGS = argparse.Namespace(
    pretrained_weights="small", precision="fp32", batch_size_per_gpu=3, num_workers=0, img_size=None, exif="apply"
)


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


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / f"{number}.png") for number in range(4)]
    for path in paths:
        noise = np.random.default_rng(int(Path(path).stem)).integers(0, 255, (40, 36, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
    return paths


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_scores_are_those_of_the_librarys_own_call(kind, tmp_path, pictures):
    """The bug: the columns behind a caption's largest id were cut off, which a SigLIP without end token needs."""
    folder = save_hugging_face(tmp_path / kind, kind)
    scorer = open_hugging_face(str(folder), ARGS, torch.device("cpu"))
    images = scorer.encode_images(named_source(ROOT, pictures, pictures)).payload
    texts = scorer.encode_texts(CAPTIONS)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer, processor = (getattr(transformers, name).from_pretrained(folder) for name in
                            ("AutoTokenizer", "AutoImageProcessor"))  # fmt: skip
    tokens = tokenizer(CAPTIONS, padding="max_length", truncation=True, return_tensors="pt")
    opened = [Image.open(path) for path in pictures]
    with torch.no_grad():
        logits = model(**tokens, **processor(images=opened, return_tensors="pt")).logits_per_image
    scale = model.logit_scale.exp().detach()
    bias = model.logit_bias.detach() if kind == "siglip" else 0.0
    expected = (logits - bias) / scale
    assert scorer.score_block(images, texts.payload).numpy() == pytest.approx(expected.numpy(), abs=1e-5)
    assert texts.num_truncated == 1
    assert texts.marks["truncated"].tolist() == [False, False, False, True]
    assert expected.std() > 1e-3


def test_a_caption_that_fills_the_context_exactly_is_not_truncated(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(save_hugging_face(tmp_path, "siglip"))

    def tokenize(texts: list[str], length: int) -> torch.Tensor:
        return tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt").input_ids

    tokens = tokens_of(tokenize, LENGTH, ["red " * (LENGTH - 1), "red " * LENGTH, ""])
    assert (tokens.truncated, tokens.num_empty) == ((1,), 1)


def test_open_clips_scores_are_those_of_its_own_model(tmp_path, pictures):
    import open_clip

    config = {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
    }
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "tiny.json")
    torch.manual_seed(0)
    model, _, transform = open_clip.create_model_and_transforms("tiny", pretrained=None)
    torch.save(model.state_dict(), tmp_path / "tiny.pt")
    scorer = open_open_clip(f"tiny/{tmp_path / 'tiny.pt'}", ARGS, torch.device("cpu"))
    images = scorer.encode_images(named_source(ROOT, pictures, pictures)).payload
    with torch.no_grad():
        own = [model.encode_text(open_clip.get_tokenizer("tiny")(CAPTIONS))]
        own.append(model.eval().encode_image(torch.stack([transform(Image.open(path)) for path in pictures])))
    text, image = (F.normalize(each) for each in own)
    scores = scorer.score_block(images, scorer.encode_texts(CAPTIONS).payload)
    assert scores.numpy() == pytest.approx((image @ text.t()).numpy(), abs=1e-5)
    with pytest.raises(ValueError, match=r"names no weights; give open_clip:ViT-B-32/TAG with one of .*openai"):
        open_open_clip("ViT-B-32", ARGS, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"cannot be opened: .*; weights of ViT-B-32: .*laion2b"):
        open_open_clip("ViT-B-32/nothing", ARGS, torch.device("cpu"))


def test_a_folder_of_hugging_face_stands_beside_our_checkpoint_and_a_name_without_opener_is_refused(tmp_path, capsys):
    folder = save_hugging_face(tmp_path / "siglip", "siglip")
    root, ours = draw_sets(tmp_path / "drawn", 3, 32), small_checkpoint(tmp_path / "clip" / "checkpoint.pth")
    options = ("--data_root", root, "--benchmarks", "vismin", "spec", "--output_dir", tmp_path / "out")
    results = evaluate("compositional", *options, "--model", folder, ours)
    assert "model.safetensors" in results[0]["model"]["files"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"compositional_siglip_model.safetensors_drawn.json", "compositional_clip_checkpoint_drawn.json"}
    assert capsys.readouterr().out.splitlines()[0].split()[-2:] == ["siglip", "clip"]
    with pytest.raises(ValueError, match="other: is unknown; give one of open_clip:, hf:"):
        evaluate("compositional", *options, "--model", "other:x")
    config = transformers.CLIPTextConfig(vocab_size=11, hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
    transformers.CLIPTextModel(config).save_pretrained(folder)
    with pytest.raises(ValueError, match="has no encoders of images and captions"):
        open_hugging_face(str(folder), ARGS, torch.device("cpu"))


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--model", "open_clip:ViT-B-23/openai", "did you mean one of ViT-B-32"),
        ("--model", "runs/gone.pth", "there is no such file or folder"),
        ("--benchmarks", "colorswop", "is unknown; choose one of"),
    ],
)
def test_unknown_names_are_answered_within_a_second_of_computing(option, name, message):
    words = ["compositional", "--data_root", ".", option, name]
    code = f"""import sys, time
from dino_sparo.__main__ import main
try: main({words})
finally: print('torch' in sys.modules, time.process_time() < 1)"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout) == (1, "False True\n")
    assert message in found.stderr

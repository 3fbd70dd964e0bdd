"""Models of open_clip and transformers as scorers: their own scores, captions without an end token, unknown names."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from clip_fakes import evaluate, small_checkpoint
from hugging_face import LENGTH, save_hugging_face
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from dino_sparo.image_text.evaluation.protocol import ROOT, named_source
from dino_sparo.image_text.evaluation.published import open_hugging_face, open_open_clip, tokens_of
from studies.drawn_sets import draw_sets

CAPTIONS = ["a red star left of a blue ring", "a blue star left of a red ring", "ring", "a red " * 9]
ARGS = argparse.Namespace(
    pretrained_weights="small", precision="fp32", batch_size_per_gpu=3, num_workers=0, img_size=None, exif="apply"
)


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
    assert " at 0x" not in results[0]["view"]  # an address of this process
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"compositional_siglip_model.safetensors_drawn.json", "compositional_clip_checkpoint_drawn.json"}
    assert not any("failures" in found for result in results for found in result["benchmarks"].values())
    assert capsys.readouterr().out.splitlines()[0].split()[-2:] == ["siglip", "clip"]
    with pytest.raises(ValueError, match="other: is unknown; give one of open_clip:, hf:"):
        evaluate("compositional", *options, "--model", "other:x")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:5000])
    with pytest.raises(ValueError, match="cannot be opened by transformers: Error while deserializing"):  # was a bug
        open_hugging_face(str(folder), ARGS, torch.device("cpu"))
    weights.write_bytes(content)
    config = transformers.CLIPTextConfig(vocab_size=11, hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
    transformers.CLIPTextModel(config).save_pretrained(folder)
    with pytest.raises(ValueError, match="has no encoders of images and captions"):
        open_hugging_face(str(folder), ARGS, torch.device("cpu"))


def test_a_folder_that_lacks_files_is_refused(tmp_path):
    """The bug: transformers makes a tokenizer without words, or draws the weights at random; both gave results."""
    folder = save_hugging_face(tmp_path, "clip")
    words = [path.rename(path.with_suffix(".gone")) for path in folder.glob("tokenizer*.json")]
    with pytest.raises(ValueError, match=r"a tokenizer without words; get all files, such as tokenizer\.json"):
        open_hugging_face(str(folder), ARGS, torch.device("cpu"))
    for path in words:
        path.rename(path.with_suffix(".json"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["visual_projection.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights of CLIPModel, such as visual_projection\.weight; get all"):
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

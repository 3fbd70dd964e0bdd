"""Random scores with ties -> the numbers of the official code of eight compositional benchmarks of 2022 to 2024.

    python tests/reference/record_recent_sets.py --checkouts FOLDER

FOLDER holds a clone of each repository of CHECKOUTS under its name. Only the code that turns scores into numbers counts:
models, tokenizers and detectors are stand-ins, which give scores that are drawn from a seed (../support/recent_sets.py).
ColorSwap's evaluation is a notebook on Colab, which could not be had.
"""

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

import numpy as np
import open_clip  # noqa: F401  (before stand-ins take the place of modules that it imports)
import torch

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "support"))
import recent_sets as files  # noqa: E402

CHECKOUTS = {
    "sugarcrepe++": "scpp",
    "cola": "COLA",
    "mmvp-vlm": "MMVP",
    "bivlc": "BiVLC",
    "hard-positives": "hard_positives",
    "valse": "VALSE",
    "vismin": "vismin",
    "spec": "SPEC",
}


def stub(name: str, **members: object) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(members)
    return module


def printed(path: Path, modules: dict, *argv: str) -> str:
    """What a script prints, with stand-ins for modules."""
    output = io.StringIO()
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(sys, "argv", [str(path), *argv]),
        mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        runpy.run_path(str(path), run_name="__main__")
    return output.getvalue()


def unit(score: float) -> list[float]:
    """A vector of length one whose cosine with (1, 0) is the score."""
    return [score, (1 - score**2) ** 0.5]


def numbers(words: str) -> torch.Tensor:
    return torch.tensor([int(word) for word in words.removeprefix("a photo of ").split()])


def sugarcrepe_pp(checkout: Path, root: Path) -> dict:
    scores = files.tables(1, files.NUM, 1, 3)
    files.sugarcrepe_pp(root)
    model = types.SimpleNamespace(
        eval=lambda: None,
        encode_image=lambda image, normalize: torch.tensor([[1.0, 0.0]]),
        encode_text=lambda ids, normalize: torch.tensor([unit(float(scores[ids[0], 0, ids[1]]))]),
    )
    model.to = lambda device: model
    load = lambda **names: (model, None, lambda image: torch.zeros(1))  # noqa: E731
    package = stub("open_clip", create_model_and_transforms=load, get_tokenizer=lambda name: numbers)
    words = printed(checkout / "VLMs" / "test_Variants_CLIP.py", {"open_clip": package, "requests": stub("requests")})
    return {"swap_att": 100 * float(re.search(r"image-to-text task: (\S+)", words)[1])}


def cola(checkout: Path, root: Path) -> dict:
    with mock.patch.dict(sys.modules, torchmetrics=stub("torchmetrics")):
        rule = runpy.run_path(str(checkout / "scripts" / "eval.py"))["ColaMultiObjAcc"]
    return {"image": 100 * float(np.mean([rule(table) for table in files.tables(2, files.NUM, 2, 2)]))}


def mmvp_vlm(checkout: Path, root: Path) -> dict:
    scores = torch.from_numpy(files.tables(3, files.MMVP_PAIRS, 2, 2))
    files.mmvp_vlm(root)

    def model(images: torch.Tensor, ids: torch.Tensor) -> tuple:
        return None, scores[ids[0, 0], :, ids[0, 1]][None]

    clip = stub(
        "clip",
        load=lambda name, device: (model, lambda image: torch.zeros(1)),
        tokenize=lambda texts: numbers(texts[0])[None],
    )
    modules = {"clip": clip, "pandas": stub("pandas"), "matplotlib": stub("matplotlib")}
    modules["matplotlib.pyplot"] = stub("matplotlib.pyplot")
    words = printed(checkout / "scripts" / "evaluate_vlm.py", modules, "--directory", str(root))
    found = [float(number) for number in re.findall(r"': ([0-9.]+)", words)]
    assert len(found) == 9
    return {"macro": sum(found) / 9}


def bivlc(checkout: Path, root: Path) -> dict:
    modules = {"pandas": stub("pandas"), "datasets": stub("datasets", load_dataset=None, Dataset=None)}
    with mock.patch.dict(sys.modules, modules):
        rule = runpy.run_path(str(checkout / "src" / "CLIP_fine_tuning" / "CLIP_utils.py"))["evaluate_BiVLC"]
    rows = []
    for table in torch.from_numpy(files.tables(4, files.NUM, 2, 2)):
        model = types.SimpleNamespace(encode_image=lambda x, normalize: x, encode_text=lambda x, normalize: x)
        images, captions = torch.eye(2), table.T
        batch = {f"{kind}_{n}": rows_of[n : n + 1] for kind, rows_of in (("image", images), ("caption", captions)) for n in (0, 1)}
        rows.append([bool(each[0]) for each in rule(types.SimpleNamespace(device="cpu"), batch, model, lambda x: x)[:3]])
    return dict(zip(("text", "image", "group"), (100 * np.mean(rows, axis=0)).tolist(), strict=True))


def hard_positives(checkout: Path, root: Path) -> dict:
    """Of captions c, p, n, and the false caption n0 of the first file."""
    true, other, false, first_false = files.tables(5, files.NUM, 1, 4)[:, 0].T
    given = [np.stack([first_false, true], axis=1)[:, None], np.stack([false, other], axis=1)[:, None]]
    model = types.SimpleNamespace(get_retrieval_scores_batched=lambda loader: given.pop(0))
    names = ("VG_Attribution", "VL_Checklist_Relation", "VL_Checklist_Attribute", "VL_Checklist_Object", "CREPE_COCO_Negate")
    modules = {name: stub(name) for name in ("clip", "pandas")}
    modules["model_zoo"] = stub("model_zoo", get_model=lambda **names: (model, None))
    modules["dataset_zoo"] = stub("dataset_zoo", **{name: lambda **options: [0] for name in names})
    words = printed(checkout / "run_eval.py", modules, "replace_att", "openai-clip:ViT-B/32")
    counts = [int(line) for line in words.split("\n")[2:5]]
    return {"augmented": 100 * counts[0] / files.NUM, "brittle": 100 * (counts[1] + counts[2]) / files.NUM}


def valse(checkout: Path, root: Path) -> dict:
    scores = files.tables(6, files.NUM, 1, 2)
    files.valse(root)
    (root / "lxmert_results_json").mkdir()

    class Stand:
        @classmethod
        def from_pretrained(cls, *names: object, **options: object) -> "Stand":
            return cls()

    class Tokenizer(Stand):
        def __call__(self, sentences: list, **options: object) -> types.SimpleNamespace:
            return types.SimpleNamespace(input_ids=sentences, attention_mask=None, token_type_ids=None)

    class Lxmert(Stand):
        def __call__(self, input_ids: list, **options: object) -> dict:
            rows = [[-1.0, float(scores[question, 0, caption])] for question, caption in map(numbers, input_ids)]
            return {"cross_relationship_score": torch.tensor(rows)}

    class Detector(Stand):
        max_detections = 1

        def __call__(self, *images: object, **options: object) -> dict:
            return {}

    modules = {
        "processing_image": stub("processing_image", Preprocess=lambda config: lambda path: (0, 0, 0)),
        "modeling_frcnn": stub("modeling_frcnn", GeneralizedRCNN=Detector),
        "utils": stub("utils", Config=Detector),
        "transformers": stub("transformers", LxmertTokenizer=Tokenizer, LxmertForPreTraining=Lxmert),
        "config": stub("config", DATA={"existence": ["data/visual7w/images/", "data/existence.json"]}),
    }
    words = printed(checkout / "lxmert_valse_eval.py", modules)
    return {"existence, rounded to 0.01": float(re.search(r"acc_r: (\S+)", words)[1]), "count": int(re.search(r"sample (\d+)/", words)[1])}


def vismin(checkout: Path, root: Path) -> dict:
    rule = runpy.run_path(str(checkout / "evals" / "metrics" / "itm.py"))["compute_contrastive_score_itg"]
    rows = [
        {f"c{c}_i{i}": float(table[i, c]) for c in (0, 1) for i in (0, 1)} for table in files.tables(7, files.NUM, 2, 2)
    ]
    return {name.removesuffix("_score"): value for name, value in rule(rows).items()}


def spec(checkout: Path, root: Path) -> dict:
    def rearrange(tensor: torch.Tensor, pattern: str, **sizes: int) -> torch.Tensor:
        return tensor.flatten(0, 1) if "-> (" in pattern else tensor.unflatten(0, (sizes["B"], -1))

    modules = {"einops": stub("einops", rearrange=rearrange)}
    modules["open_clip"] = stub("open_clip", create_model_and_transforms=None, get_tokenizer=None)
    package = stub("spec_models", __path__=[str(checkout / "spec" / "models")])
    found = {}
    with mock.patch.dict(sys.modules, {**modules, "spec_models": package}), contextlib.redirect_stderr(io.StringIO()):
        wrapper = __import__("spec_models.clip_wrapper", fromlist=["CLIPWrapper"]).CLIPWrapper
        for seed, (subset, size) in enumerate(files.SPEC_SIZES.items()):
            label = torch.tensor(files.labels(seed, files.NUM, size))
            for direction in ("image2text", "text2image"):
                scores = files.tables(8 + seed, files.NUM, 1, size)[:, 0]
                candidates = torch.tensor([[unit(float(score)) for score in row] for row in scores])
                query = torch.tensor([[1.0, 0.0]]).repeat(files.NUM, 1)
                one = wrapper.__new__(wrapper)
                one.device, one.tokenizer = "cpu", lambda value: value
                one.model = types.SimpleNamespace(encode_image=lambda x: x.flatten(1).clone(), encode_text=lambda x: x.clone())
                if direction == "image2text":
                    batch = {"query_image": query, "candidate_texts": list(candidates), "label": label}
                    _, accuracy = one.i2t_evaluate(subset, Bar([batch]))
                else:
                    batch = {"query_text": query, "candidate_images": candidates[..., None, None], "label": label}
                    _, accuracy = one.t2i_evaluate(subset, Bar([batch]))
                found[f"{subset}/{direction}"] = accuracy
    return found


class Bar(list):
    """A loader of one batch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", required=True, type=Path)
    args = parser.parse_args()
    rules = (sugarcrepe_pp, cola, mmvp_vlm, bivlc, hard_positives, valse, vismin, spec)
    result = {"command": "python tests/reference/record_recent_sets.py --checkouts FOLDER"}
    for (name, folder), rule in zip(CHECKOUTS.items(), rules, strict=True):
        checkout = (args.checkouts / folder).resolve()
        commit = subprocess.check_output(["git", "-C", str(checkout), "rev-parse", "HEAD"], text=True).strip()
        origin = subprocess.check_output(["git", "-C", str(checkout), "remote", "get-url", "origin"], text=True).strip()
        with tempfile.TemporaryDirectory() as root:
            os.chdir(root)
            result[name] = {"repository": origin, "commit": commit, **rule(checkout, Path(root))}
            os.chdir(FOLDER)
    (FOLDER / "recent_sets.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Random scores with ties -> the numbers of the official code of ARO, What'sUp and VL-CheckList; ARO's shuffled captions.

    python tests/reference/record_compositional.py --aro PATH --whatsup PATH --vl_checklist PATH

Each PATH is a checkout. Only the code that turns scores into numbers runs: `evaluate_scores` of ARO and What'sUp, and
`Evaluate.eval` (task itc) of VL-CheckList with a stand-in for the model. The averages of ARO are computed as its notebook
does. Questions and scores come from ../compositional_files.py, as do words and tags for ARO's `TextShuffler`: spaCy and
nltk are stand-ins that give these, and every draw is the reversed order.
"""

import argparse
import ast
import contextlib
import importlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

import numpy as np

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "support"))
import compositional_files as files  # noqa: E402


def module_of(checkout: Path, name: str) -> types.ModuleType:
    for known in [known for known in sys.modules if known.split(".")[0] in ("dataset_zoo", "vl_checklist")]:
        del sys.modules[known]
    easydict = types.ModuleType("easydict")
    easydict.EasyDict = dict
    sys.modules["easydict"] = easydict
    sys.path.insert(0, str(checkout))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(checkout))


def evaluated(dataset: object, scores: np.ndarray) -> tuple[list, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        records = dataset.evaluate_scores(scores[:, None])
    return records, printed.getvalue()


def aro(checkout: Path, root: Path) -> dict:
    code = module_of(checkout, "dataset_zoo.aro_datasets")
    (root / "images").mkdir()
    notebook = json.loads(next((checkout / "notebooks").glob("*.ipynb")).read_text())
    line = next(t for c in notebook["cells"] for t in c["source"] if t.startswith("symmetric = "))
    symmetric = ast.literal_eval(line.removeprefix("symmetric = "))
    found = {"num_uncounted": len(set(symmetric))}
    rng = np.random.default_rng(0)
    for name, kind, names in (
        ("visual_genome_relation", code.VG_Relation, files.RELATIONS),
        ("visual_genome_attribution", code.VG_Attribution, files.ATTRIBUTES),
    ):
        files.write_json(root / f"{name}.json", files.relation_entries(rng, names, 80))
        scores = files.random_scores(1, 80, 2)
        records, _ = evaluated(kind(None, root_dir=str(root)), scores[:, ::-1])
        counted = [r["Accuracy"] for r in records if r.get("Relation") not in symmetric]
        found[name] = {"macro": 100 * float(np.mean(counted)), "num_splits": len(counted)}
    order = code.COCO_Order.__new__(code.COCO_Order)
    found["order_captions"] = order_captions(checkout)
    found["order"] = 100 * float(evaluated(order, files.random_scores(2, 60, 5))[0][0]["Precision@1"])
    return found


def order_captions(checkout: Path) -> list[list[str]]:
    """Each caption and its four shuffled ones, as `COCO_Order` makes them."""
    kind = module_of(checkout, "dataset_zoo.perturbations").TextShuffler
    shuffler = kind.__new__(kind)  # whose __init__ loads spaCy's model
    pre_caption = module_of(checkout, "dataset_zoo.retrieval").pre_caption
    nltk = types.ModuleType("nltk")
    options = []
    for caption in files.TAGGED_CAPTIONS:
        words = files.tagged(caption)
        text = " ".join(word for word, _ in words)
        document = [types.SimpleNamespace(text=word, tag_=tag) for word, tag in words]
        shuffler.nlp = lambda _, document=document: document
        nltk.word_tokenize = lambda _, words=words: [word for word, _ in words]
        with (
            mock.patch.dict(sys.modules, nltk=nltk),
            mock.patch.object(np.random, "permutation", lambda array: array[::-1]),
            mock.patch.object(random, "shuffle", list.reverse),
        ):
            functions = (
                *(shuffler.shuffle_nouns_and_adj, shuffler.shuffle_allbut_nouns_and_adj),
                *(shuffler.shuffle_within_trigrams, shuffler.shuffle_trigrams),
            )
            options.append([pre_caption(text, 30), *(pre_caption(shuffle(text), 30) for shuffle in functions)])
    return options


def whatsup(checkout: Path, root: Path) -> dict:
    code = module_of(checkout, "dataset_zoo.aro_datasets")
    found = {}
    for subset, name, prepositions in (("A", "images", files.CONTROLLED_A), ("B", "clevr", files.CONTROLLED_B)):
        entries = files.controlled_entries(prepositions)
        files.write_json(root / f"controlled_{name}_dataset.json", entries)
        (root / f"controlled_{name}").mkdir()
        dataset = code.Controlled_Images(None, root_dir=str(root), subset=subset)
        records, printed = evaluated(dataset, files.random_scores(3, len(entries), 4))
        numbers = [float(line.rpartition(":")[2]) for line in printed.splitlines()]
        found[subset] = dict(zip(("micro", "pairs", "sets"), numbers, strict=True))
        found[subset]["splits"] = {r["Preposition"].split("_")[0]: 100 * float(r["Accuracy"]) for r in records}
    spatial = code.COCO_QA.__new__(code.COCO_QA)
    spatial.subset, spatial.all_prepositions = "two", ["left", "right"] * 25
    found["spatial"] = float(evaluated(spatial, files.random_scores(4, 50, 2))[1])
    return found


def vl_checklist(checkout: Path, root: Path) -> dict:
    code = module_of(checkout, "vl_checklist.evaluate")
    scores = files.random_scores(5, 70, 2)

    class Model:
        def model_name(self) -> str:
            return "random"

        def predict(self, images: list, texts: list, src_type: str) -> dict:
            return {"probs": [(0.0, scores[int(i.split("/")[-1]), int(t)]) for i, t in zip(images, texts, strict=True)]}

    (root / "vg").mkdir()
    for number in range(70):
        (root / "vg" / str(number)).touch()
    entries = [[str(number), {"POS": ["0"], "NEG": ["1"]}] for number in range(70)]
    files.write_json(root / "data" / "color.json", entries)
    corpus = {"ANNO_PATH": "data/color.json", "IMG_ROOT": "vg/", "TYPE": "TUPLE_JSON"}
    files.write_json(root / "corpus" / "v1" / "Attribute" / "color" / "vg.yaml", corpus)  # JSON is YAML
    data = {"TEST_DATA": ["vg"], "TYPES": ["Attribute/color"]}
    output = {"DIR": "output", "NUM": 0}
    config = {"BATCH_SIZE": 16, "MAX_NUM": 0, "TASK": "itc", "MODEL_NAME": "random", "DATA": data, "OUTPUT": output}
    files.write_json(root / "config.yaml", config)
    os.chdir(root)
    with contextlib.redirect_stdout(io.StringIO()):
        found = code.Evaluate("config.yaml", Model()).eval("Attribute/color")
    return {"accuracy, rounded to four digits of a share": found["vg"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"aro": aro, "whatsup": whatsup, "vl_checklist": vl_checklist}
    for name in parts:
        parser.add_argument(f"--{name}", required=True, type=Path, help="a checkout")
    args = parser.parse_args()
    result = {"command": "python tests/reference/record_compositional.py --aro PATH --whatsup PATH --vl_checklist PATH"}
    for name, record in parts.items():
        checkout = getattr(args, name).resolve()
        commit = subprocess.check_output(["git", "-C", str(checkout), "rev-parse", "HEAD"], text=True).strip()
        with tempfile.TemporaryDirectory() as root:
            result[name] = {"commit": commit, **record(checkout, Path(root))}
            os.chdir(FOLDER)
    (FOLDER / "compositional.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

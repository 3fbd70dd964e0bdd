"""An encoder -> a folder for `transformers.AutoModel.from_pretrained(FOLDER, trust_remote_code=True)`, and to the hub.

The folder needs no dino_sparo where it is loaded: `modeling_sparo.py` holds the code of the encoder, copied from
`models/` at export. It imports torch, transformers and timm.
"""

import ast
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dino_sparo.data.views import EvalTransform
from dino_sparo.models import backbone, encoder, pooling, readout, readouts
from dino_sparo.models.encoder import Encoder
from dino_sparo.runtime import choices
from dino_sparo.runtime.faults import require
from dino_sparo.runtime.files import parse_json
from dino_sparo.weights.checkpoint import EXPORTED_WEIGHTS, MODEL_TYPE

CODE = "modeling_sparo.py"
BICUBIC = 3  # as Pillow numbers it
RESULTS = ("knn", "linear", "zero_shot", "retrieval")  # result files whose scores the model card shows

CARD = """\
---
library_name: transformers
pipeline_tag: image-feature-extraction
license: apache-2.0
tags:
- dino_sparo
- {readout}
---

# {title}

An image encoder, trained with dino_sparo: {architecture}.
The read-out `{readout}` turns its tokens into {slots}.

| training | |
|---|---|
{facts}

{scores}
## Use

```python
from PIL import Image
from transformers import AutoImageProcessor, AutoModel

processor = AutoImageProcessor.from_pretrained("{name}")
model = AutoModel.from_pretrained("{name}", trust_remote_code=True).eval()
output = model(**processor(Image.open("photo.jpg"), return_tensors="pt"))
output.pooler_output  # (1, {encoding_dim}), the encoding
output.slots  # (1, {num_slots}, {slot_dim})
output.slot_attentions  # (1, {num_slots}, N), the weight of each token in each slot
output.last_hidden_state  # (1, N, {embed_dim}), the tokens, class token first
```

The code needs `pip install torch transformers timm`. With `pip install dino_sparo`, `dino_sparo.load_encoder("{name}")`
loads the same encoder.
"""


def write_folder(
    network: Encoder,
    folder: Path,
    record: Mapping[str, Any],
    write_safe: Callable[[dict[str, Tensor], Path, Mapping[str, dict[str, Any]]], Path],
) -> Path:
    """Write configuration, weights, preprocessing, code and model card.

    Args:
        network: the encoder.
        folder: of the result.
        record: `encoder`, the description of the encoder, and where the weights come from.
        write_safe: writes weights together with JSON files.
    """
    description = record["encoder"]
    origin = {key: value for key, value in record.items() if key != "encoder"}
    config = {
        "model_type": MODEL_TYPE,
        "architectures": ["SparoEncoderModel"],
        "auto_map": {
            "AutoConfig": f"{CODE.removesuffix('.py')}.SparoEncoderConfig",
            "AutoModel": f"{CODE.removesuffix('.py')}.SparoEncoderModel",
        },
        "dtype": "float32",
        "encoder": description,
        "origin": origin,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CODE).write_text(modeling_code(), encoding="utf-8")
    (folder / "README.md").write_text(model_card(network, record, record.get("name", folder.name)), encoding="utf-8")
    documents = {
        "config.json": config,
        "preprocessor_config.json": _preprocessing(network.config.img_size, description),
    }
    weights = {f"encoder.{key}": value for key, value in network.state_dict().items()}
    write_safe(weights, folder / EXPORTED_WEIGHTS, documents)
    return folder


def modeling_code() -> str:
    """The code of the encoder and of its model for transformers, as one file that does not import this package."""
    require("transformers", "exports for Hugging Face")
    from dino_sparo.weights import huggingface_model

    imports: set[str] = set()
    bodies = []
    for module in (choices, readout, pooling, readouts, backbone, encoder, huggingface_model):
        imports_of, body = _without_imports(module)
        imports |= imports_of
        bodies.append(body)
    header = '"""The encoder of a dino_sparo checkpoint, for transformers. Generated; the license is Apache-2.0."""\n'
    require_nothing = "def require(package, purpose):\n    pass  # importing it says what is missing\n\n"
    plain, named = (sorted(line for line in imports if line.startswith(word)) for word in ("import ", "from "))
    return "\n".join([header, "from __future__ import annotations\n", *plain, *named, "\n", require_nothing, *bodies])


def _without_imports(module: ModuleType) -> tuple[set[str], str]:
    """Imports of other packages, and the source without docstring and imports."""
    source = inspect.getsource(module)
    lines, imports = source.splitlines(), set()
    docstring, *statements = ast.parse(source).body
    removed = [docstring]
    for statement in statements:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            removed.append(statement)
            name = getattr(statement, "module", None) or ""
            if not name.startswith(("dino_sparo", "jaxtyping")):  # annotations are not evaluated
                imports.add(ast.unparse(statement))
    for statement in removed:
        for number in range(statement.lineno - 1, statement.end_lineno or statement.lineno):
            lines[number] = ""
    return imports, "\n".join(lines).strip("\n") + "\n\n"


def _preprocessing(img_size: int, description: Mapping[str, Any]) -> dict[str, Any]:
    """`preprocessor_config.json`: resize, crop and normalise as `EvalTransform` does."""
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": EvalTransform(img_size).resize_size},
        "resample": BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": img_size, "width": img_size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": description["mean"],
        "image_std": description["std"],
    }


def scores_beside(checkpoint: Path) -> dict[str, str]:
    """The accuracies in the result files beside a checkpoint, in words, by the name of the evaluation."""
    paths = [checkpoint.with_name(f"{name}.json") for name in RESULTS]
    scores = {path.stem: _score(parse_json(path.read_bytes())) for path in paths if path.is_file()}
    return {name: score for name, score in scores.items() if score}


def model_card(network: Encoder, record: Mapping[str, Any], name: str) -> str:
    """README.md of the folder: architecture, training, scores, and a snippet that runs."""
    config = network.config
    blank = torch.zeros(1, config.in_chans, config.img_size, config.img_size)
    with torch.no_grad():
        _, *sizes = network.readout_output(blank).slots.shape
    facts = ("epoch", "step", "checkpoint", "sha256")
    rows = [f"| {key} | {record[key]} |" for key in facts if record.get(key) is not None]
    scores = [f"| {key} | {score} |" for key, score in record["scores"].items()]
    table = ["| evaluation | accuracy |", "|---|---|", *scores, ""] if scores else ["No scores were recorded.", ""]
    return CARD.format(
        title=name,
        name=name,
        readout=config.readout,
        architecture=network.summary,
        slots=f"{sizes[0]} slots of {sizes[1]} numbers" if sizes[0] > 1 else f"one encoding of {sizes[1]} numbers",
        facts="\n".join(rows),
        scores="\n".join(table),
        encoding_dim=network.encoding_dim,
        num_slots=sizes[0],
        slot_dim=sizes[1],
        embed_dim=network.backbone.embed_dim,
    )


def _score(values: Mapping[str, Any]) -> str:
    """The accuracies in a result file, in words; empty if it has none that this version knows."""
    results = values.get("results")
    rows = results if isinstance(results, list) else [values]
    named = [(f"{row['k']}-NN " if "k" in row else "", row.get("top1", row.get("accuracy"))) for row in rows]
    return ", ".join(f"{name}{value:.2f} %" for name, value in named if isinstance(value, float))

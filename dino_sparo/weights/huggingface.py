"""An encoder -> a folder for `transformers.AutoModel.from_pretrained(FOLDER, trust_remote_code=True)`.

The folder needs no dino_sparo where it is loaded: `modeling_sparo.py` holds the code of the encoder, copied from
`models/` at export. It imports torch, transformers and timm.
"""

import ast
import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import model_entrypoint

from dino_sparo.data.views import EvalTransform
from dino_sparo.models import architectures, backbone, encoder, foreign_backbone, pooling, readout, readouts
from dino_sparo.models.architectures import TIMM
from dino_sparo.models.encoder import Encoder, EncoderConfig
from dino_sparo.models.readouts import BUILT_IN_READOUTS
from dino_sparo.runtime.faults import UserError
from dino_sparo.weights.checkpoint import EXPORTED_WEIGHTS, MODEL_TYPE
from dino_sparo.weights.file import Replacing, write_safetensors
from dino_sparo.weights.origin import training_facts

CODE = "modeling_sparo.py"

CARD = Path(__file__).with_name("model_card.md").read_text(encoding="utf-8")


def write_folder(network: Encoder, out: str, record: Mapping[str, Any], replacing: Replacing) -> Path:
    """Write configuration, weights, preprocessing, code and model card.

    Args:
        network: the encoder.
        out: the folder.
        record: `encoder`, the description of the encoder, and where the weights come from.
        replacing: which files may be replaced.
    """
    require_exportable(network.config)
    folder, module = Path(out), CODE.removesuffix(".py")
    parts = {"AutoConfig": "SparoEncoderConfig", "AutoModel": "SparoEncoderModel"}
    images = timm_images(record["encoder"])
    if network.config.in_chans == 3:
        parts["AutoImageProcessor"] = "SparoImageProcessor"
    else:  # tensors of levels from 0 to 255, of which timm changes size and normalisation alone
        images |= {name: [255 * value for value in images[name]] for name in ("mean", "std")}
    documents = {
        CODE: modeling_code(),
        "README.md": model_card(network, record, record.get("name", folder.resolve().name)),
        "config.json": {
            "model_type": MODEL_TYPE,
            "architectures": ["SparoEncoderModel"],
            "auto_map": {part: f"{module}.{name}" for part, name in parts.items()},
            "dtype": "float32",
            "image_processor_type": "TimmWrapperImageProcessor",
            "pretrained_cfg": images,
            "encoder": record["encoder"],
            "origin": {key: value for key, value in record.items() if key != "encoder"},
        },
    }
    weights = {f"encoder.{key}": value for key, value in network.state_dict().items()}
    return write_safetensors(weights, folder / EXPORTED_WEIGHTS, documents, replacing).parent


def require_exportable(config: EncoderConfig) -> None:
    """Refuse a read-out or a backbone of the user's files, whose code the folder cannot hold."""
    is_custom = {f"--readout {config.readout}": config.readout not in BUILT_IN_READOUTS}
    if config.arch.startswith(TIMM):
        module = model_entrypoint(config.arch.removeprefix(TIMM)).__module__
        is_custom[f"--arch {config.arch}"] = module.partition(".")[0] not in ("timm", "dino_sparo")
    for part in filter(is_custom.get, is_custom):
        raise UserError(
            f"{part} is code of your own, which a folder for Hugging Face cannot hold; choose --format onnx, or "
            "safetensors, which your file can load"
        )


def modeling_code() -> str:
    """The code of the encoder and of its model for transformers, as one file that does not import this package."""
    imports: set[str] = set()
    bodies = []
    modules = (architectures, readout, pooling, readouts, foreign_backbone, backbone, encoder)
    for path in (*(module.__file__ for module in modules), Path(__file__).with_name("huggingface_model.py")):
        imports_of, body = _without_imports(Path(str(path)).read_text(encoding="utf-8"))
        imports |= imports_of
        bodies.append(body)
    header = '"""The encoder of a dino_sparo checkpoint, for transformers. Generated; the license is Apache-2.0."""\n'
    require_nothing = "def require(package, purpose):\n    pass  # importing it says what is missing\n\n"
    plain, named = (sorted(line for line in imports if line.startswith(word)) for word in ("import ", "from "))
    return "\n".join([header, "from __future__ import annotations\n", *plain, *named, "\n", require_nothing, *bodies])


def _without_imports(source: str) -> tuple[set[str], str]:
    """Imports of other packages, and the source without docstring and imports."""
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


def timm_images(description: Mapping[str, Any]) -> dict[str, Any]:
    """How timm prepares images like `EvalTransform`: it resizes to floor(side / crop_pct) and rounds as torchvision."""
    side = description["img_size"]
    images = {name: description[name] for name in ("mean", "std")} | {"interpolation": "bicubic", "crop_mode": "center"}
    resize_size = EvalTransform(side).resize_size
    return {**images, "crop_pct": side / (resize_size + 0.5), "input_size": [description["in_chans"], side, side]}


def model_card(network: Encoder, record: Mapping[str, Any], name: str) -> str:
    """README.md of the folder: architecture, training, scores, and a snippet that runs."""
    config = network.config
    blank = torch.zeros(1, config.in_chans, config.img_size, config.img_size)
    with torch.no_grad():
        _, *sizes = network.readout_output(blank).slots.shape
    facts = {**training_facts(record), "checkpoint": f"{record['checkpoint']}, SHA-256 {record['sha256']}"}
    scores = [f"| {_as_text(key)} | {_as_text(score)} |" for key, score in facts.pop("scores").items()]
    facts["options"] = " ".join(f"{name}={value}" for name, value in (facts["options"] or {}).items()) or None
    rows = [f"| {key} | {_as_text(value)} |" for key, value in facts.items() if value is not None]
    table = ["| evaluation | scores |", "|---|---|", *scores, ""] if scores else ["No scores were recorded.", ""]
    levels = f"255 * torch.rand({config.in_chans}, 300, 400)"
    return CARD.format(
        images='ImageOps.exif_transpose(Image.open("photo.jpg"))' if config.in_chans == 3 else levels,
        title=_as_text(name),
        name=repr(name),
        readout=config.readout,
        architecture=network.summary,
        slots=f"{sizes[0]} slots of {sizes[1]} numbers" if sizes[0] > 1 else f"one encoding of {sizes[1]} numbers",
        facts="\n".join(rows),
        scores="\n".join(table),
        encoding_dim=network.encoding_dim,
        num_slots=sizes[0],
        slot_dim=sizes[1],
        embed_dim=network.backbone.embed_dim,
        num_prefix_tokens=network.backbone.num_prefix_tokens,
        timm=f'"timm>={timm.__version__}"' if config.arch.startswith(TIMM) else "timm",
    )


def _as_text(value: object) -> str:
    """A value as one line of text in Markdown, whatever it contains."""
    line = "".join(letter if letter.isprintable() else " " for letter in str(value))
    return re.sub(r"([\\`*|\[\]])", r"\\\1", html.escape(line, quote=False))

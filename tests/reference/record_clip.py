"""Record numbers from the SPARO authors' CLIP code, for the tests to compare with.

    python tests/reference/record_clip.py --reference PATH_TO_A_CHECKOUT_OF_ankitkv/sparo-clip --output tests/reference

Runs on a CPU in seconds. The checkout is only imported: CLIP+GAP and CLIP with the discrete bottleneck (FDT) encode
generated images and captions with generated weights, and tell how long the gradient of each of their parameters is.
"""

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import weights as w

VISION = {"layers": 4, "width": 128, "head_width": 32, "patch_size": 8, "image_size": 32}


def record(clip_class: type, name: str) -> dict[str, np.ndarray]:
    """Features before and after they are normalised, and gradient norms by name."""
    pooling = {"global_average_pool": True} if name == "gap_image" else {}
    codes = {"use_codebook": True, "num_codes": w.CLIP_NUM_CODES} if name == "fdt" else {}
    model = clip_class(w.CLIP_EMBED_DIM, {**VISION, **pooling}, w.CLIP_TEXT, **codes).eval()
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    model.load_state_dict({key: torch.as_tensor(value) for key, value in w.clip_state(shapes).items()})
    images, ids = torch.from_numpy(w.images("clip", 3, 32, 32)), torch.from_numpy(w.clip_captions())
    encoded = {"image": model.encode_image(images), "text": model.encode_text(ids)}
    out: dict[str, np.ndarray] = {}
    for side, features in encoded.items():
        direction = torch.from_numpy(w.normal(f"clip/direction/{side}", tuple(features.shape)))
        model.zero_grad()
        (features * direction).sum().backward(retain_graph=True)
        norms = {key: p.grad.norm().item() for key, p in model.named_parameters() if p.grad is not None}
        out[f"{name}/{side}"] = features.detach().numpy()
        out[f"{name}/{side}/grad_names"] = np.array(sorted(norms))
        out[f"{name}/{side}/grad_norms"] = np.array([norms[key] for key in sorted(norms)], dtype=np.float32)
    out[f"{name}/image_normalized"] = model.encode_image(images, normalize=True).detach().numpy()
    out[f"{name}/names"] = np.array(sorted(shapes))
    out[f"{name}/shapes"] = np.array([json.dumps(shapes[key]) for key in sorted(shapes)])
    return out


def main() -> None:
    """Record both models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True, help="checkout of ankitkv/sparo-clip")
    parser.add_argument("--output", type=Path, default=w.FOLDER, help="folder of the recorded file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(args.reference / "src"))
    from open_clip.model import CLIP

    commit = subprocess.check_output(["git", "-C", str(args.reference), "rev-parse", "HEAD"], text=True).strip()
    header = {
        "repository": "https://github.com/ankitkv/sparo-clip",
        "commit": commit,
        "command": "python tests/reference/record_clip.py --reference PATH",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "date": datetime.date.today().isoformat(),
    }
    parts = {key: value for name in ("gap_image", "fdt") for key, value in record(CLIP, name).items()}
    np.savez_compressed(args.output / "clip.npz", header=np.array(json.dumps(header)), **parts)


if __name__ == "__main__":
    main()

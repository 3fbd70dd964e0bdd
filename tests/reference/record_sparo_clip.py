"""Record numbers from the SPARO authors' CLIP code, for the tests to compare with.

    python tests/reference/record_sparo_clip.py --reference PATH_TO_A_CHECKOUT_OF_ankitkv/sparo-clip --commit HASH

Runs on a CPU in seconds. The checkout is only imported: its small models with SPARO, with shared keys, with the linear
bottleneck and plain encode generated images and token ids with generated weights. Weights are drawn from their names, as
`weights.py` does, and are not stored; their names and shapes are.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path

import numpy as np
import torch
import weights as w


def main() -> None:
    """Record every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True, help="checkout of ankitkv/sparo-clip")
    parser.add_argument("--commit", required=True, help="its commit, for the header")
    parser.add_argument("--output", type=Path, default=w.FOLDER, help="folder of the recorded file")
    args = parser.parse_args()
    sys.path.insert(0, str(args.reference / "src"))
    from open_clip.model import CLIP

    torch.set_num_threads(1)
    header = {
        "repository": "https://github.com/ankitkv/sparo-clip",
        "commit": args.commit,
        "command": "python tests/reference/record_sparo_clip.py --reference PATH --commit HASH",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "date": datetime.date.today().isoformat(),
    }
    arrays: dict[str, np.ndarray] = {}
    shapes = {}
    images, ids = torch.from_numpy(w.images("sparo_clip", 3, 32, 32)), torch.from_numpy(w.sparo_clip_ids())
    for case, settings in w.SPARO_CLIP_CASES.items():
        model = CLIP(**w.SPARO_CLIP, **settings).eval()
        own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        model.load_state_dict({name: torch.from_numpy(value) for name, value in w.sparo_clip_state(own).items()})
        shapes[case] = {name: list(shape) for name, shape in own.items()}
        with torch.no_grad():
            arrays[f"{case}/image"] = model.encode_image(images, normalize=True).numpy()
            arrays[f"{case}/text"] = model.encode_text(ids, normalize=True).numpy()
    details = {"header": np.array(json.dumps(header)), "shapes": np.array(json.dumps(shapes))}
    np.savez_compressed(args.output / "sparo_clip.npz", **details, **arrays)


if __name__ == "__main__":
    main()

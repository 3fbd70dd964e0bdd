"""Record the class token of facebookresearch/xcit's XCiT-nano on drawn weights and images into xcit.npz.

    git clone https://github.com/facebookresearch/xcit PATH
    git -C PATH checkout 82f5291f412604970c39a912586e008ec009cdca
    python tests/reference/record_xcit.py --reference PATH
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import weights

SIZES = ((64, 96), (48, 48))  # height, width


def main() -> None:
    """Record names and shapes of the weights, and features of images of two sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True, help="checkout of facebookresearch/xcit")
    args = parser.parse_args()
    sys.path.insert(0, str(args.reference))
    import xcit

    model = xcit.xcit_nano_12_p16(num_classes=0).eval()
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    drawn = {name: torch.from_numpy(value) for name, value in weights.state(shapes, "xcit/").items()}
    model.load_state_dict(drawn, strict=False)  # running statistics of batch norm stay
    with torch.no_grad():
        found = {
            f"features/{height}x{width}": model(torch.from_numpy(weights.images("xcit", 2, height, width))).numpy()
            for height, width in SIZES
        }
    commit = subprocess.check_output(["git", "-C", str(args.reference), "rev-parse", "HEAD"], text=True).strip()
    header = {"repository": "facebookresearch/xcit", "commit": commit, "command": " ".join(sys.argv)}
    arrays = {"header": np.array(json.dumps(header)), "shapes": np.array(json.dumps(shapes)), **found}
    np.savez_compressed(weights.FOLDER / "xcit.npz", **arrays)


if __name__ == "__main__":
    main()

"""Record the measures of "Formalizing the binding problem", for tests/test_studies_binding.py.

    git clone https://github.com/KordingLab/formalizing-the-binding-problem PATH
    git -C PATH checkout e2892cb
    python tests/reference/record_binding.py --reference PATH --commit "$(git -C PATH rev-parse HEAD)"

Runs in seconds. The checkout is only imported; its module `activation`, which loads pretrained networks, is left out.
Two probes with drawn weights read drawn features. Labels are all sets of up to three of six pairs.
Writes binding.json: entropies H(Y | F), logits, and what `Trainer.eval` returns.
"""

import argparse
import datetime
import json
import sys
import types
from itertools import combinations
from pathlib import Path

import torch
import weights as w
from torch.utils.data import DataLoader, TensorDataset

GROUPS, MAX_OBJECTS, WIDTH, HIDDEN, BATCH_SIZE = (3, 2), 3, 5, 7, 16


def draw_weights(probe: torch.nn.Module, case: str) -> None:
    """Set every weight of a probe to numbers drawn from its name."""
    state = {
        name: torch.from_numpy(w.normal(f"{case}/{name}", value.shape)) for name, value in probe.state_dict().items()
    }
    probe.load_state_dict(state)


def main() -> None:
    """Record every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True, help="checkout of formalizing-the-binding-problem")
    parser.add_argument("--commit", required=True, help="its commit, for the header")
    args = parser.parse_args()
    sys.path.insert(0, str(args.reference / "src"))
    sys.modules["activation"] = types.SimpleNamespace(ModelWrapper=None)  # type: ignore[assignment]
    from dataset.ColorShape import BindingDataset
    from probes import get_probe
    from trainer import Trainer

    pairs = BindingDataset([list(range(size)) for size in GROUPS], max_objects=MAX_OBJECTS)
    sets = [rows for size in range(MAX_OBJECTS + 1) for rows in combinations(range(pairs.n_conjunctions), size)]
    y = torch.zeros(len(sets), pairs.n_conjunctions, dtype=torch.long)
    for row, members in zip(y, sets, strict=True):
        row[list(members)] = 1
    f, z = pairs.Y_to_F(y), torch.from_numpy(w.normal("binding/z", (len(y), WIDTH)))
    entropies = pairs.get_H_Y_F(f)
    cases = {}
    for case, kind in {"linear": "linear", "mlp": "dnn"}.items():
        data = TensorDataset(z, y, f, entropies)
        data.mean_H_Y_given_F = entropies.mean().item()
        trainer = Trainer.__new__(Trainer)
        trainer.device, trainer.pin_memory, trainer.use_cached_activations = "cpu", False, True
        trainer.train_probe_Y = trainer.train_probe_F = True
        trainer.model, trainer.y_dim, trainer.f_dim = torch.nn.Identity(), y.shape[1], f.shape[1]
        trainer.criterion_Y = trainer.criterion_F = torch.nn.BCEWithLogitsLoss()
        trainer.train_dataloader = trainer.eval_train_dataloader = trainer.val_dataloader = None
        trainer.test_dataloader = DataLoader(data, BATCH_SIZE)
        trainer.probe_Y, trainer.probe_F = (
            get_probe(kind, WIDTH, n, n, dnn_hidden_dim=HIDDEN, dnn_num_layers=2) for n in (y.shape[1], f.shape[1])
        )
        draw_weights(trainer.probe_Y, f"binding/{case}/Y")
        draw_weights(trainer.probe_F, f"binding/{case}/F")
        with torch.no_grad():
            logits = {"Y": trainer.probe_Y(z, y).tolist(), "F": trainer.probe_F(z, f).tolist()}
        cases[case] = {"logits": logits, **trainer.eval("test")}
    header = {
        "repository": "https://github.com/KordingLab/formalizing-the-binding-problem",
        "commit": args.commit,
        "command": "python tests/reference/record_binding.py --reference PATH --commit HASH",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    content = {"header": header, "Y": y.tolist(), "F": f.tolist(), "entropies": entropies.tolist(), "cases": cases}
    (w.FOLDER / "binding.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()

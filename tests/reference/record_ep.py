"""Record numbers from the code of efficient probing, for tests/evaluation/test_attentive.py to compare with.

    git clone https://github.com/billpsomas/efficient-probing PATH
    git -C PATH checkout b8f4fb84e8127d41aaad997d35b98c2f43f33125
    python tests/reference/record_ep.py --reference PATH

Runs on a CPU in seconds. The checkout is only imported: its module `ep` and its module `aim` read generated tokens with
generated weights, its LARS takes five steps, its schedule gives learning rates. Weights are drawn from their names, as
`weights.py` does, and are not stored.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path

import numpy as np
import torch
import weights as w

COMMIT = "b8f4fb84e8127d41aaad997d35b98c2f43f33125"


def main() -> None:
    """Record every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True, help="checkout of billpsomas/efficient-probing")
    parser.add_argument("--output", type=Path, default=w.FOLDER, help="folder of the recorded file")
    args = parser.parse_args()
    sys.path.insert(0, str(args.reference))
    from poolings.aim import AttentionPoolingClassifier
    from poolings.ep import EfficientProbing
    from util.lars import LARS
    from util.lr_sched import adjust_learning_rate

    torch.set_num_threads(1)
    arrays: dict[str, np.ndarray] = {}
    counts = {}
    modules = {name: EfficientProbing(**sizes) for name, sizes in w.EP_CASES.items()}
    modules["attention"] = AttentionPoolingClassifier(**w.AIM)
    for name, module in modules.items():
        shapes = {key: tuple(value.shape) for key, value in module.state_dict().items()}
        state = {key: torch.from_numpy(value) for key, value in w.state(shapes, "ep/").items()}
        module.load_state_dict(state, strict=False)  # without the running statistics
        module.train()
        tokens = torch.from_numpy(w.ep_tokens()).requires_grad_()
        output = module(tokens)
        (output * torch.from_numpy(w.normal(f"ep/{name}/cotangent", output.shape))).sum().backward()
        arrays[f"{name}/output"] = output.detach().numpy()
        arrays[f"{name}/token_gradient"] = tokens.grad.numpy()
        arrays[f"{name}/query_gradient"] = module.cls_token.grad.numpy()
        arrays[f"{name}/evaluated"] = module.eval()(tokens).detach().numpy()
        counts[name] = sum(parameter.numel() for parameter in module.parameters())

    parameters = {name: torch.nn.Parameter(torch.from_numpy(value)) for name, value in w.optim_start().items()}
    optimizer = LARS(parameters.values(), lr=0.3, momentum=0.9)
    for step in range(w.OPTIM_STEPS):
        for name, gradient in w.optim_gradients(step).items():
            parameters[name].grad = torch.from_numpy(gradient)
        optimizer.step()
    arrays |= {f"lars/{name}": parameter.detach().numpy() for name, parameter in parameters.items()}
    settings = argparse.Namespace(lr=1.0, min_lr=0.0, warmup_epochs=2, epochs=5)
    times = [epoch + step / 3 for epoch in range(5) for step in range(3)]
    arrays["schedule"] = np.array([adjust_learning_rate(optimizer, time, settings) for time in times])

    header = {
        "repository": "https://github.com/billpsomas/efficient-probing",
        "commit": COMMIT,
        "command": "python tests/reference/record_ep.py --reference PATH",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "date": datetime.date.today().isoformat(),
    }
    details = {"header": np.array(json.dumps(header)), "parameters": np.array(json.dumps(counts))}
    np.savez_compressed(args.output / "ep.npz", **details, **arrays)


if __name__ == "__main__":
    main()

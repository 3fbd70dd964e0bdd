"""Record numbers from the original DINO code, for the tests to compare with.

    python tests/reference/record.py --reference PATH_TO_A_CHECKOUT_OF_facebookresearch/dino --output tests/reference

Runs on a CPU in about a minute. The checkout is only imported: its networks, loss, optimiser, schedules, training loop
and k-NN vote run as they are, in a process group of one (gloo). Moves to a GPU are made no-ops.
"""

import argparse
import contextlib
import datetime
import io
import json
import subprocess
import sys
import tempfile
import types
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import weights as w
from torch import nn
from torch.overrides import TorchFunctionMode

Arrays = dict[str, np.ndarray]


def fill(module: nn.Module, salt: str = "") -> None:
    """Give a module the generated weights, by its own names."""
    own = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    filled = {name: torch.from_numpy(value) for name, value in w.state(own, salt).items()}
    missing = module.load_state_dict(filled, strict=False)
    assert not missing.unexpected_keys


def to_numpy(value: torch.Tensor) -> np.ndarray:
    return value.detach().numpy().copy()


def record_vits(vits: types.ModuleType) -> Arrays:
    """Class tokens, the class tokens of the last four blocks, and the class token's attention in the last block."""
    out: Arrays = {}
    for arch, patch_size, height, width in w.VIT_CASES:
        model = vits.__dict__[arch](patch_size=patch_size).eval()
        fill(model, f"{arch}/{patch_size}/")
        images = torch.from_numpy(w.images(arch, 2, height, width))
        key = f"{arch}/{patch_size}/{height}x{width}"
        out[f"{key}/forward"] = to_numpy(model(images))
        if (arch, height) in {("vit_tiny", 224), ("vit_tiny", 96), ("vit_small", 96)}:
            layers = [to_numpy(tokens[:, 0]) for tokens in model.get_intermediate_layers(images, n=4)]
            out[f"{key}/intermediate"] = np.stack(layers)
            out[f"{key}/attention"] = to_numpy(model.get_last_selfattention(images)[:, :, 0])
    return out


def record_small_vit(vits: types.ModuleType) -> Arrays:
    """Every token, every position embedding, and the gradients of a ViT with three blocks."""
    settings = {**w.SMALL_VIT, "img_size": [w.SMALL_VIT["img_size"]]}
    model = vits.VisionTransformer(**settings, qkv_bias=True, norm_layer=partial(nn.LayerNorm, eps=1e-6))
    fill(model, "small_vit/")
    out: Arrays = {}
    for height, width in w.SMALL_SIZES:
        images = torch.from_numpy(w.images("small_vit", 2, height, width))
        embedded = model.patch_embed(images)
        with_class = torch.cat([model.cls_token.expand(2, -1, -1), embedded], dim=1)
        key = f"{height}x{width}"
        out[f"{key}/pos"] = to_numpy(model.interpolate_pos_encoding(with_class, height, width)[0])
        out[f"{key}/tokens"] = to_numpy(model.get_intermediate_layers(images, n=1)[0][1])
        model.zero_grad()
        loss = (model(images) * torch.from_numpy(w.normal("small_vit/direction", (2, 48)))).sum()
        loss.backward()
        out[f"{key}/grad_pos_embed"] = to_numpy(model.pos_embed.grad[0, :, 0])
        norms = [parameter.grad.norm() for parameter in model.parameters()]
        out[f"{key}/grad_norms"] = to_numpy(torch.stack(norms))
    out["names"] = np.array([name for name, _ in model.named_parameters()])
    return out


def record_heads(vits: types.ModuleType) -> tuple[Arrays, dict]:
    """Logits and gradients in training mode, running statistics, logits in evaluation mode, and the initialisation."""
    out: Arrays = {}
    shapes = {}
    inputs = torch.from_numpy(w.normal("head/inputs", (5, w.HEAD_SIZES["in_dim"])))
    direction = torch.from_numpy(w.normal("head/direction", (5, w.HEAD_SIZES["out_dim"])))
    for use_bn, norm_last_layer, layers in w.HEAD_CASES:
        head = vits.DINOHead(**w.HEAD_SIZES, use_bn=use_bn, norm_last_layer=norm_last_layer, nlayers=layers)
        fill(head, "head/")
        key = f"bn{int(use_bn)}_norm{int(norm_last_layer)}_layers{layers}"
        leaf = inputs.clone().requires_grad_()
        logits = head(leaf)
        (logits * direction).sum().backward()
        out[f"{key}/train"] = to_numpy(logits)
        out[f"{key}/grad_inputs"] = to_numpy(leaf.grad)
        for name, parameter in head.named_parameters():
            if parameter.grad is not None:
                out[f"{key}/grad/{name}"] = np.float32(parameter.grad.norm())
        for name, buffer in head.named_buffers():
            out[f"{key}/buffer/{name}"] = to_numpy(buffer)
        out[f"{key}/eval"] = to_numpy(head.eval()(inputs))
        shapes[key] = {name: list(value.shape) for name, value in head.state_dict().items()}
    torch.manual_seed(0)
    fresh = vits.DINOHead(in_dim=67, out_dim=1009, hidden_dim=257, bottleneck_dim=101)
    for name, parameter in fresh.named_parameters():
        out[f"init/{name}"] = np.array([parameter.std().item(), parameter.abs().max().item()])
    return out, shapes


def record_losses(main_dino: types.ModuleType) -> Arrays:
    """Three calls in a row at different epochs: losses, gradients of the student's logits, centers."""
    out: Arrays = {}
    for num_crops, epochs in w.LOSS_CALLS.items():
        temperatures = (w.LOSS["warmup_teacher_temp"], w.LOSS["teacher_temp"], w.LOSS["warmup_epochs"])
        loss = main_dino.DINOLoss(w.LOSS["out_dim"], num_crops, *temperatures, w.LOSS["epochs"])
        for call, epoch in enumerate(epochs):
            student, teacher = map(torch.from_numpy, w.loss_logits(num_crops, call))
            student.requires_grad_()
            value = loss(student, teacher, epoch)
            value.backward()
            key = f"crops{num_crops}/call{call}"
            out[f"{key}/loss"] = to_numpy(value)
            out[f"{key}/grad"] = to_numpy(student.grad)
            out[f"{key}/center"] = to_numpy(loss.center)
    return out


def record_schedules(utils: types.ModuleType) -> Arrays:
    """One value per step of several cosine schedules with and without warm-up."""
    return {f"schedule{i}": utils.cosine_scheduler(*settings) for i, settings in enumerate(w.SCHEDULES)}


def record_clipping(utils: types.ModuleType) -> Arrays:
    """Gradients after clipping each parameter's own norm."""
    out: Arrays = {}
    for limit in (0.3, 3.0):
        model = nn.ParameterDict({name: nn.Parameter(torch.zeros(3, 5)) for name in w.clip_gradients()})
        for name, gradient in w.clip_gradients().items():
            model[name].grad = None if gradient is None else torch.from_numpy(gradient)
        utils.clip_gradients(model, limit)
        for name, parameter in model.items():
            if parameter.grad is not None:
                out[f"clip{limit}/{name}"] = to_numpy(parameter.grad)
    return out


def record_optimizers(utils: types.ModuleType) -> Arrays:
    """Parameters after each step of the three optimisers, as the training script builds them."""
    builders = {
        "adamw": lambda groups: torch.optim.AdamW(groups),
        "sgd": lambda groups: torch.optim.SGD(groups, lr=0, momentum=0.9),
        "lars": lambda groups: utils.LARS(groups),
    }
    out: Arrays = {}
    for kind, build in builders.items():
        start = {name: nn.Parameter(torch.from_numpy(value)) for name, value in w.optim_start().items()}
        model = nn.ParameterDict(start)
        optimizer = build(utils.get_params_groups(model))
        for step in range(w.OPTIM_STEPS):
            lr, weight_decay = w.optim_settings(step)
            for i, group in enumerate(optimizer.param_groups):
                group["lr"] = lr
                if i == 0:
                    group["weight_decay"] = weight_decay
            for name, gradient in w.optim_gradients(step).items():
                model[name].grad = torch.from_numpy(gradient)
            optimizer.step()
            for name, parameter in model.items():
                out[f"{kind}/step{step}/{name}"] = to_numpy(parameter)
    return out


def build_pair(modules: types.SimpleNamespace, norm_last_layer: bool) -> tuple[nn.Module, nn.Module]:
    """Student under DistributedDataParallel and teacher, with the same generated weights, as the script builds them."""
    utils, vits = modules.utils, modules.vits

    def network(norm: bool) -> nn.Module:
        backbone = vits.vit_tiny(patch_size=16, img_size=[w.STEPS["global_size"]])
        return utils.MultiCropWrapper(backbone, vits.DINOHead(192, w.STEPS["out_dim"], norm_last_layer=norm))

    student, teacher = network(norm_last_layer), network(True)
    fill(student, "steps/")
    student = nn.parallel.DistributedDataParallel(student)
    teacher.load_state_dict(student.module.state_dict())
    for parameter in teacher.parameters():
        parameter.requires_grad = False
    return student, teacher


def summarise(module: nn.Module, key: str) -> Arrays:
    """Norm, sum and five values of every parameter."""
    rows = [w.summary(name, to_numpy(parameter)) for name, parameter in module.named_parameters()]
    names = [name for name, _ in module.named_parameters()]
    return {f"{key}/names": np.array(names), f"{key}/rows": np.stack(rows)}


def record_steps(modules: types.SimpleNamespace) -> Arrays:
    """Two epochs of five steps through the reference's own train_one_epoch, in fp32."""
    utils, main_dino, s = modules.utils, modules.main_dino, w.STEPS
    out: Arrays = {}
    epochs, steps = s["epochs"], s["steps_per_epoch"]
    batches = [([torch.from_numpy(crop) for crop in w.step_crops(i)], None) for i in range(epochs * steps)]
    for run, (clip_grad, norm_last_layer) in w.STEP_RUNS.items():
        student, teacher = build_pair(modules, norm_last_layer)
        temperatures = (s["warmup_teacher_temp"], s["teacher_temp"], s["warmup_teacher_temp_epochs"])
        loss = main_dino.DINOLoss(s["out_dim"], 2 + s["num_local"], *temperatures, epochs)
        losses: list[float] = []
        loss.register_forward_hook(lambda _module, _inputs, value, log=losses: log.append(value.item()))
        optimizer = torch.optim.AdamW(utils.get_params_groups(student))
        scale = s["batch_size"] / 256.0
        lrs = utils.cosine_scheduler(s["lr"] * scale, s["min_lr"], epochs, steps, s["warmup_epochs"])
        decays = utils.cosine_scheduler(s["weight_decay"], s["weight_decay_end"], epochs, steps)
        momenta = utils.cosine_scheduler(s["momentum_teacher"], 1, epochs, steps)
        args = types.SimpleNamespace(epochs=epochs, clip_grad=clip_grad, freeze_last_layer=s["freeze_last_layer"])
        for epoch in range(epochs):
            loader = batches[epoch * steps : (epoch + 1) * steps]
            with contextlib.redirect_stdout(io.StringIO()):
                main_dino.train_one_epoch(
                    student, teacher, teacher, loss, loader, optimizer, lrs, decays, momenta, epoch, None, args
                )
            last = student.module.head.last_layer
            out[f"{run}/epoch{epoch}/last_layer"] = to_numpy(last.weight_v[:3, :5])
        out[f"{run}/losses"] = np.array(losses)
        out[f"{run}/center"] = to_numpy(loss.center)
        out |= summarise(student.module, f"{run}/student") | summarise(teacher, f"{run}/teacher")
    return out


class KeepPredictions(TorchFunctionMode):
    """Keeps what the vote sorts, since the reference returns accuracies only."""

    def __init__(self) -> None:
        super().__init__()
        self.ranked: list[torch.Tensor] = []
        self.votes: list[torch.Tensor] = []

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.Tensor.sort:
            self.votes.append(result[0].clone())
            self.ranked.append(result[1].clone())
        return result


def record_knn(eval_knn: types.ModuleType) -> Arrays:
    """Accuracies in percent, predictions, and which top-5 sets do not hang on classes without a vote."""
    train_features, train_labels, test_features, test_labels = map(torch.from_numpy, w.knn_problem())
    out: Arrays = {}
    for k in w.KNN["ks"]:
        with KeepPredictions() as kept:
            accuracies = eval_knn.knn_classifier(
                train_features,
                train_labels,
                test_features,
                test_labels,
                k,
                w.KNN["temperature"],
                num_classes=w.KNN["num_classes"],
            )
        out[f"k{k}/accuracy"] = np.array(accuracies)
        out[f"k{k}/ranked"] = to_numpy(torch.cat(kept.ranked)).astype(np.int16)
        out[f"k{k}/votes"] = to_numpy(torch.cat(kept.votes))
    return out


def record_keys(modules: types.SimpleNamespace, heads: dict) -> dict:
    """Names and shapes of a checkpoint's networks, and the names in each of the optimiser's groups."""
    groups = {}
    for norm_last_layer in (True, False):
        student, teacher = build_pair(modules, norm_last_layer)
        names = {id(parameter): name for name, parameter in student.module.named_parameters()}
        found = modules.utils.get_params_groups(student)
        groups[f"norm{int(norm_last_layer)}"] = [[names[id(p)] for p in group["params"]] for group in found]
    shapes = {
        key: {name: list(value.shape) for name, value in module.state_dict().items()}
        for key, module in (("student", student), ("teacher", teacher))
    }
    return {"checkpoint": shapes, "param_groups": groups, "heads": heads}


def import_reference(path: Path) -> types.SimpleNamespace:
    """The reference's modules, with every move to a GPU a no-op."""
    sys.path.insert(0, str(path))
    import eval_knn
    import utils
    import vision_transformer

    import main_dino

    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.cuda.synchronize = lambda *args: None
    # Averages the meters over ranks on a GPU; with one rank there is nothing to average.
    utils.SmoothedValue.synchronize_between_processes = lambda self: None
    return types.SimpleNamespace(utils=utils, vits=vision_transformer, main_dino=main_dino, eval_knn=eval_knn)


def main() -> None:
    """Record every part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True, help="checkout of facebookresearch/dino")
    parser.add_argument("--output", type=Path, default=w.FOLDER, help="folder of the recorded files")
    args = parser.parse_args()
    torch.set_num_threads(1)
    modules = import_reference(args.reference)
    commit = subprocess.check_output(["git", "-C", str(args.reference), "rev-parse", "HEAD"], text=True).strip()
    header = {
        "repository": "https://github.com/facebookresearch/dino",
        "commit": commit,
        "command": "python tests/reference/record.py --reference PATH",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "date": datetime.date.today().isoformat(),
    }
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        heads, head_shapes = record_heads(modules.vits)
        with torch.no_grad():
            vits = record_vits(modules.vits)
        parts = {
            "vit": vits,
            "small_vit": record_small_vit(modules.vits),
            "head": heads,
            "loss": record_losses(modules.main_dino),
            "schedules": record_schedules(modules.utils),
            "clipping": record_clipping(modules.utils),
            "optimizers": record_optimizers(modules.utils),
            "steps": record_steps(modules),
            "knn": record_knn(modules.eval_knn),
        }
        keys = record_keys(modules, head_shapes)
        dist.destroy_process_group()
    args.output.mkdir(parents=True, exist_ok=True)
    for name, arrays in parts.items():
        np.savez_compressed(args.output / f"{name}.npz", header=np.array(json.dumps(header)), **arrays)
    (args.output / "keys.json").write_text(json.dumps({"header": header, **keys}, indent=0) + "\n")


if __name__ == "__main__":
    main()

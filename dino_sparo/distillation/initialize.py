"""A file of weights -> the start of a student and a teacher: encoders, heads, the loss's center, the optimizer's state.

`weights/initialize.py` starts an encoder alone; `training/resume.py` resumes a run.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dino_sparo.training.optim import is_unregularised
from dino_sparo.training.updater import Updater
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.entries import NETWORKS, network_weights
from dino_sparo.weights.file import CheckpointError
from dino_sparo.weights.initialize import initialize_encoder_of

BATCH_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
LENGTHS = "head.last_layer.weight_g"  # of the prototypes; not in the optimizer if they are fixed


def initialize_networks(
    networks: Mapping[str, Any], updater: Updater, path: str, new_head: bool = False, optimizer: str | None = None
) -> str:
    """Start student, teacher and loss, in place, from the weights that fit.

    A checkpoint with a student and a teacher gives each network its own weights. From any other file, or with
    `new_head`, both take the same encoder. The parts of a head are taken in order, and then the loss's center. After
    the first that does not fit, all later parts stay random: prototypes mean nothing without the MLP of their training.

    Args:
        networks: `student` and `teacher`, each with an `encoder` and a `head`; then the loss.
        updater: of the student; changed if an optimizer is named.
        path: one of our checkpoints, the reference's full checkpoint, or a file for `initialize_encoder`.
        new_head: leave heads and center as they are.
        optimizer: name of the optimizer, whose state is taken for the weights that are taken, with the scale of fp16's
            gradients; None: the optimizer stays as it is.

    Returns:
        A line for the log: what was taken and what was not, with the reason.

    Raises:
        CheckpointError: the file has no encoder of the same make, or no state of that optimizer.
    """
    checkpoint, student = load_checkpoint(path), networks["student"]
    moments = None if optimizer is None else saved_moments(checkpoint, path, optimizer)
    if new_head or not all(isinstance(checkpoint.get(name), Mapping) for name in NETWORKS):
        report = initialize_encoder_of(student.encoder, checkpoint, path)
        networks["teacher"].load_state_dict(student.state_dict())
        return f"{report}; the head is new ({'--init_head new' if new_head else 'the file has none'})"
    for name in NETWORKS:
        report = initialize_encoder_of(networks[name].encoder, checkpoint, path, name, with_head=False)
        weights = network_weights(checkpoint, name, path)
        head = {name.removeprefix("head."): value for name, value in weights.items() if name.startswith("head.")}
        taken, reason = ([], "weights of the encoder are new") if report.new else load_parts(networks[name].head, head)
    parts, stems = parts_of(student.head.state_dict()), tuple(f"head.{part}." for part in taken)
    for key in [key for key in networks if key not in NETWORKS]:
        parts += parts_of(networks[key].state_dict())
        if not reason:
            center, reason = load_parts(networks[key], checkpoint.get(key, {}))
            taken = [*taken, *center]
    line = f"{report}; heads and center: taken {', '.join(taken) or 'nothing'}"
    if reason:
        line += f"; new {', '.join(parts[len(taken) :])} ({reason})"
    if moments is None:
        return line
    moments = {name: state for name, state in moments.items() if name in report.taken or name.startswith(stems)}
    if updater.scaler is not None and "fp16_scaler" in checkpoint:
        updater.scaler.load_state_dict(checkpoint["fp16_scaler"])
    return f"{line}; optimizer: {load_moments(updater.optimizer, student, moments)}"


def parts_of(weights: Iterable[str]) -> list[str]:
    """First words of the names of weights, in their order."""
    return list(dict.fromkeys(name.partition(".")[0] for name in weights))


def load_parts(module: nn.Module, weights: Mapping[str, Tensor]) -> tuple[list[str], str]:
    """Load the parts of a module, in place and in their order, up to the first that does not fit.

    Returns:
        Names of the loaded parts; the reason why the next part does not fit, empty if all fit.
    """
    current, parts, reason = module.state_dict(), list[str](), ""
    for part in parts_of(current):
        names = [name for name in {**current, **weights} if name.partition(".")[0] == part]
        shapes = {
            name: [tuple(at[name].shape) if name in at else "absent" for at in (weights, current)] for name in names
        }
        reason = next((f"{name}: {a} in the file, {b} here" for name, (a, b) in shapes.items() if a != b), "")
        if reason:
            break
        module.load_state_dict({**module.state_dict(), **{name: weights[name] for name in names}})
        parts.append(part)
    return parts, reason


def saved_moments(checkpoint: Mapping[str, Any], source: str, optimizer: str) -> dict[str, dict[str, Any]]:
    """State of the student's optimizer in a checkpoint, by the names of the weights.

    Earlier versions and the reference saved no names; there the weights stand in the order of `optim.param_groups`.

    Raises:
        CheckpointError: the checkpoint has no such state, or the state of another optimizer.
    """

    def refused(words: str) -> CheckpointError:
        return CheckpointError(f"--init_optimizer true: {source} has {words}, or leave --init_optimizer out")

    saved = checkpoint.get("optimizer")
    if not isinstance(saved, Mapping) or not isinstance(checkpoint.get("student"), Mapping):
        raise refused("no student with an optimizer; give a run's checkpoint.pth")
    options = checkpoint.get("args", {})
    before = (options if isinstance(options, Mapping) else vars(options)).get("optimizer", optimizer)
    if before != optimizer:
        raise refused(f"the state of {before}, this run has --optimizer {optimizer}; give --optimizer {before}")
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    names = [name for group in saved["param_groups"] for name in group.get("param_names", ())]
    if not names:
        weights = network_weights(checkpoint, "student", source)
        names = [name for name in weights if name.rpartition(".")[2] not in BATCH_STATISTICS]
        names = [name for name in names if name != LENGTHS or len(names) == len(indices)]
        names = sorted(names, key=lambda name: is_unregularised(name, weights[name]))
    if len(names) != len(indices):
        numbers = f"an optimizer of {len(indices)} weights and a student of {len(names)}"
        raise refused(f"{numbers}; give another checkpoint")
    return {name: saved["state"][index] for name, index in zip(names, indices, strict=True) if index in saved["state"]}


def load_moments(optimizer: torch.optim.Optimizer, network: nn.Module, moments: Mapping[str, dict[str, Any]]) -> str:
    """Load the saved state of each weight that it fits, in place; returns the number of weights, for the log."""
    names = {parameter: name for name, parameter in network.named_parameters()}
    state = {}
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    for index, weight in enumerate(trained):
        values = moments.get(names[weight], {})
        tensors = [value for name, value in values.items() if name != "step" and isinstance(value, Tensor)]
        if tensors and all(value.shape == weight.shape for value in tensors):
            state[index] = values
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return f"state of {len(state)} of {len(trained)} weights taken"

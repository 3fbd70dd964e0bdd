"""Frozen tokens -> read-outs with a linear classifier each, trained side by side: attentive probes.

    python eval_linear.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet --probe linear sparo ep

The encoder runs once for all read-outs and learning rates. Protocol: Psomas et al., "Attention, please! Revisiting
attentive probing through the lens of efficiency" (ICLR 2026), and its code: LARS without weight decay, warm-up and
cosine per step, batch norm without scale and shift before the classifier. There, `ep` reads patch tokens, and the class
token if pretraining uses that token. Here, every read-out reads all tokens, as SPARO does.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dino_sparo.evaluation.encoders import EvaluatedEncoder
from dino_sparo.evaluation.linear.probe import INIT_STD, MOMENTUM, Probes
from dino_sparo.models.encoder import Encoder, EncoderConfig, readout_sizes
from dino_sparo.models.pooling import BATCH_NORM_EPS
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import is_main
from dino_sparo.weights.entries import encoder_description
from dino_sparo.weights.folder import save_checkpoint

TRUST_COEFFICIENT = 0.001
OWN = "linear"  # the encoder's own read-out, frozen
# Probe, which is also the name of its read-out -> sizes of the read-out, from the options and the width of the tokens.
SIZES: dict[str, Callable[[argparse.Namespace, int], dict[str, int]]] = {
    "sparo": lambda args, width: {
        "num_slots": args.sparo_slots,
        "slot_dim": args.sparo_slot_dim,
        "key_dim": args.sparo_key_dim,
        "group_size": args.sparo_group_size,
    },
    "ep": lambda args, width: {
        "num_slots": args.ep_queries,
        "slot_dim": part_of(width, args.ep_queries * args.ep_reduction, "--ep_queries x --ep_reduction"),
    },
    "attention": lambda args, width: {
        "num_slots": args.attention_heads,
        "slot_dim": part_of(width, args.attention_heads, "--attention_heads"),
    },
}


def part_of(width: int, parts: int, option: str) -> int:
    """Width of one of `parts` equal parts of a token."""
    if width % parts:
        divisors = [number for number in range(1, width + 1) if width % number == 0]
        near = " and ".join(map(str, sorted(divisors, key=lambda number: abs(number - parts))[:2]))
        raise UserError(f"{option} is {parts}, which does not divide the tokens' width {width}; {near} are the nearest")
    return width // parts


def probe_configs(encoder: Encoder, args: argparse.Namespace) -> dict[str, EncoderConfig]:
    """Kind of a probe -> the configuration of the backbone with its read-out, for `linear` that of the encoder."""
    config = encoder.config
    if config.kind.takes_raw_tokens:
        raise UserError(f"--probe reads normalised tokens, and readout {config.readout!r} leaves none in the backbone")
    if args.n_last_blocks is not None or args.avgpool_patchtokens:
        raise UserError(
            "--n_last_blocks and --avgpool_patchtokens do not apply to --probe, which reads the last tokens"
        )
    width = encoder.backbone.embed_dim
    shared: dict[str, Any] = {"replace_block": config.replaces_block, "group_size": 1}
    return {
        name: config if name == OWN else replace(config, readout=name, **{**shared, **SIZES[name](args, width)})
        for name in dict.fromkeys(args.probe)
    }


class ReadoutProbes(Probes):
    """Read-outs with a classifier each, on the same tokens; one of each kind per learning rate.

        logits = W BatchNorm(concat(slots)) + b

    Probes of one kind start from the same weights: they differ in their learning rate alone.

    Args:
        encoder: whose tokens are read.
        configs: kind of a probe -> its configuration, see `probe_configs`.
        token_shape: N and D of the tokens.
        num_classes: outputs of a classifier.
        num_rates: learning rates, and so probes, per kind.
        seed: of all initial weights.
    """

    min_batch = 2  # batch norm needs a variance

    def __init__(
        self,
        encoder: Encoder,
        configs: Mapping[str, EncoderConfig],
        token_shape: Sequence[int],
        num_classes: int,
        num_rates: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.configs = configs
        self.kinds = [kind for kind in configs for _ in range(num_rates)]
        self.num_probes, self.token_shape = len(self.kinds), tuple(token_shape)
        self.readouts, self.norms, self.classifiers = (nn.ModuleList() for _ in range(3))
        for config in configs.values():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                if config is encoder.config:
                    readout, width = deepcopy(encoder.readout).requires_grad_(False), encoder.encoding_dim
                else:
                    readout = config.kind.build(readout_sizes(encoder.backbone, config))
                    width = config.num_slots * config.slot_dim
                classifier = nn.Linear(width, num_classes)
                nn.init.normal_(classifier.weight, std=INIT_STD)
                nn.init.zeros_(classifier.bias)
            for _ in range(num_rates):
                self.readouts.append(deepcopy(readout))
                self.norms.append(nn.BatchNorm1d(width, affine=False, eps=BATCH_NORM_EPS))
                self.classifiers.append(deepcopy(classifier))

    def forward(self, features: Float[Tensor, "B F"]) -> Float[Tensor, "probes B classes"]:
        """Tokens in one row per image (B, N*D) -> logits (probes, B, classes)."""
        tokens = features.unflatten(1, self.token_shape)
        parts = zip(self.readouts, self.norms, self.classifiers, strict=True)
        return torch.stack([linear(norm(readout(tokens).slots.flatten(1))) for readout, norm, linear in parts])

    def train(self, mode: bool = True) -> "ReadoutProbes":
        """Set train or eval mode; a frozen read-out is always in eval mode."""
        super().train(mode)
        for kind, readout in zip(self.kinds, self.readouts, strict=True):
            readout.train(mode and kind != OWN)
        return self

    def rates(self, learning_rates: Sequence[float]) -> dict[str, float]:
        """Name of a trained parameter -> the learning rate of its probe."""
        names = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        return {name: learning_rates[int(name.split(".")[1]) % len(learning_rates)] for name in names}

    def describe(self, index: int) -> dict[str, Any]:
        """Kind and numbers of trained parameters of a probe, for the result."""
        readout, classifier = (
            sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
            for module in (self.readouts[index], self.classifiers[index])
        )
        return {"probe": self.kinds[index], "readout_parameters": readout, "parameters": readout + classifier}


class ProbeLARS:
    """LARS with momentum and without weight decay, with a learning rate for each parameter.

        g <- 0.001 ||w|| / ||g|| g        (parameters with two or more dimensions, where both norms are positive)
        v <- 0.9 v + g,   w <- w - lr v

    Source: the code of efficient probing, whose LARS is that of MoCo v3.
    """

    def __init__(self, probe: nn.Module, rates: Mapping[str, float]) -> None:
        self.probe, self.rates = probe, rates
        self.momenta = {name: torch.zeros_like(probe.get_parameter(name)) for name in rates}

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Move the weights; `factor` scales all learning rates."""
        for name, rate in self.rates.items():
            parameter = self.probe.get_parameter(name)
            gradient: Any = parameter.grad
            if parameter.ndim > 1:
                weight_norm, norm = parameter.norm(), gradient.norm()
                ratio = TRUST_COEFFICIENT * weight_norm / norm
                gradient *= torch.where((weight_norm > 0) & (norm > 0), ratio, torch.ones_like(ratio))
            parameter.sub_(self.momenta[name].mul_(MOMENTUM).add_(gradient), alpha=factor * rate)


def warmup_cosine(epoch: int, epochs: int, warmup_epochs: float, num_steps: int) -> Iterator[float]:
    """Factors on the learning rate, one per step of an epoch: linear from 0 during warm-up, then a cosine to 0."""
    for step in range(num_steps):
        time = epoch + step / num_steps
        if time < warmup_epochs:
            yield time / warmup_epochs
        else:
            yield (1 + math.cos(math.pi * (time - warmup_epochs) / (epochs - warmup_epochs))) / 2


def save_readouts(
    probes: ReadoutProbes, rows: Sequence[Mapping[str, Any]], subject: EvaluatedEncoder, path: Path
) -> None:
    """Write the backbone with the best read-out of each kind as a checkpoint."""
    for kind, row in best_of_each(rows).items():
        if kind == OWN or not is_main():
            continue
        encoder = Encoder(subject.encoder.backbone, probes.readouts[rows.index(row)], probes.configs[kind])
        description = encoder_description(encoder.config, subject.mean, subject.std)
        teacher = {name: value.cpu() for name, value in encoder.state_dict().items()}
        save_checkpoint(
            {"teacher": teacher, "encoder": description, "recipe": {"max_value": subject.max_value}},
            path.with_name(path.name.replace("probes", f"probe_{kind}", 1)),
        )


def best_of_each(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Kind of a probe -> the row of its best learning rate."""
    kinds = dict.fromkeys(row["probe"] for row in rows)
    return {kind: max((row for row in rows if row["probe"] == kind), key=lambda row: row["top1"]) for kind in kinds}

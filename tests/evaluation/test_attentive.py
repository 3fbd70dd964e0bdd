"""`dino-sparo linear --probe`: read-outs with classifiers on frozen tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import eval_knn
import eval_linear
import visualize_attention
from dino_sparo.__main__ import run
from dino_sparo.evaluation.features import Features
from dino_sparo.evaluation.linear.attentive import ProbeLARS, ReadoutProbes, warmup_cosine
from dino_sparo.evaluation.linear.probe import ProbeRun, cached_batches, train_one_epoch
from dino_sparo.models.encoder import create_encoder
from dino_sparo.models.pooling import AttentionReadout, EfficientProbing
from dino_sparo.models.readout import ReadoutOutput
from dino_sparo.weights.encoder import load_encoder
from dino_sparo.weights.entries import encoder_description
from tests.reference import weights as w

B, N, D, CLASSES = 5, 7, 24, 3


@pytest.fixture(scope="module")
def recorded() -> Any:
    return np.load(w.FOLDER / "ep.npz")


def loaded(module: nn.Module, shapes: dict[str, tuple[str, tuple[int, ...]]]) -> nn.Module:
    """The module with the recorder's weights: our name -> (the reference's name, the reference's shape)."""
    values = {name: torch.from_numpy(w.parameter(theirs, shape, "ep/")) for name, (theirs, shape) in shapes.items()}
    own = module.state_dict()
    module.load_state_dict({name: values.get(name, value).reshape(value.shape) for name, value in own.items()})
    return module


def our_module(name: str) -> nn.Module:
    if name == "attention":
        shapes = {f"{letter}.weight": (D, D) for letter in "kv"}
        return loaded(
            AttentionReadout(D, w.AIM["num_heads"]),
            {
                "queries": ("cls_token", (1, 1, D)),
                "key_proj.weight": ("k.weight", shapes["k.weight"]),
                "value_proj.weight": ("v.weight", shapes["v.weight"]),
            },
        )
    queries, reduction = w.EP_CASES[name]["num_queries"], w.EP_CASES[name]["d_out"]
    return loaded(
        EfficientProbing(D, queries, D // reduction // queries),
        {"queries": ("cls_token", (1, queries, D)), "value_proj.weight": ("v.weight", (D // reduction, D))},
    )


@pytest.mark.parametrize("name", ["ep", "ep_narrow", "attention"])
def test_read_outs_equal_the_reference_on_equal_weights(name: str, recorded: Any) -> None:
    """Output, gradients, number of parameters, and the output in eval mode, of billpsomas/efficient-probing."""
    module = our_module(name).train()
    tokens = torch.from_numpy(w.ep_tokens()).requires_grad_()
    output = module(tokens).slots.flatten(1)
    (output * torch.from_numpy(w.normal(f"ep/{name}/cotangent", output.shape))).sum().backward()
    found = {
        "output": output,
        "token_gradient": tokens.grad,
        "query_gradient": module.queries.grad.reshape(recorded[f"{name}/query_gradient"].shape),
        "evaluated": module.eval()(tokens).slots.flatten(1),
    }
    for key, value in found.items():
        torch.testing.assert_close(value.detach(), torch.from_numpy(recorded[f"{name}/{key}"]), rtol=1e-4, atol=1e-5)
    counts = json.loads(str(recorded["parameters"]))
    assert sum(parameter.numel() for parameter in module.parameters()) == counts[name]


@pytest.mark.parametrize("name", ["ep", "attention"])
def test_a_masked_token_gets_no_attention_and_changes_nothing(name: str) -> None:
    module, tokens = our_module(name).eval(), torch.from_numpy(w.ep_tokens())
    mask = torch.arange(N) < 4
    output = module(tokens, mask.expand(B, -1))
    assert not output.attention[:, :, 4:].any()
    torch.testing.assert_close(output.attention.sum(dim=-1), torch.ones(output.attention.shape[:2]))
    torch.testing.assert_close(output.slots, module(tokens[:, :4]).slots)


def test_lars_and_schedule_equal_the_reference(recorded: Any) -> None:
    module = nn.ParameterDict({name: torch.from_numpy(value) for name, value in w.optim_start().items()})
    optimizer = ProbeLARS(module, dict.fromkeys(module, 0.6))
    for step in range(w.OPTIM_STEPS):
        for name, gradient in w.optim_gradients(step).items():
            module[name].grad = torch.from_numpy(gradient)
        optimizer.step(0.5)
    for name, value in module.items():
        torch.testing.assert_close(value.detach(), torch.from_numpy(recorded[f"lars/{name}"]), rtol=1e-5, atol=1e-6)
    factors = [factor for epoch in range(5) for factor in warmup_cosine(epoch, 5, 2.0, 3)]
    assert factors == pytest.approx(recorded["schedule"].tolist(), abs=1e-12)


def small_encoder(readout: str = "cls") -> Any:
    torch.manual_seed(3)
    return create_encoder(
        "vit_micro", 8, readout, img_size=32, num_slots=2, slot_dim=5, key_dim=4, drop_path_rate=0.0
    ).eval()


def small_configs(encoder: Any, *kinds: str) -> dict[str, Any]:
    words = ["--probe", *kinds, "--sparo_slots", "3", "--sparo_slot_dim", "5", "--sparo_key_dim", "7"]
    args = eval_linear.get_args_parser().parse_args([*words, "--ep_queries", "4", "--attention_heads", "8"])
    from dino_sparo.evaluation.linear.attentive import probe_configs

    return probe_configs(encoder, args)


def test_a_probe_does_not_feel_the_others_and_the_frozen_read_out_does_not_move() -> None:
    encoder = small_encoder("sparo")
    configs = small_configs(encoder, "linear", "sparo", "ep", "attention")
    features = Features(torch.randn(9, 17 * 128), torch.arange(9) % CLASSES, torch.arange(9))

    def trained(some: dict[str, Any], rates: list[float]) -> ReadoutProbes:
        probes = ReadoutProbes(encoder, some, (17, 128), CLASSES, len(rates), seed=1)
        optimizer = ProbeLARS(probes, probes.rates(rates))
        # The last of three batches has one image, of which there is no variance: it is skipped.
        train_one_epoch(probes, optimizer, cached_batches(features, torch.device("cpu"), batch_size=4)(0), [1.0] * 3)
        return probes

    together = trained(configs, [5.0, 50.0])
    assert together.kinds == [kind for kind in configs for _ in range(2)]
    for number, kind in enumerate(together.kinds):
        alone = trained({kind: configs[kind]}, [(5.0, 50.0)[number % 2]])
        for name, value in alone.state_dict().items():
            part, _, rest = name.partition(".0.")
            torch.testing.assert_close(together.state_dict()[f"{part}.{number}.{rest}"], value)
    for name, value in encoder.readout.state_dict().items():
        assert torch.equal(together.readouts[0].state_dict()[name], value)
    start = ReadoutProbes(encoder, configs, (17, 128), CLASSES)
    assert not torch.equal(together.readouts[2].queries, start.readouts[1].queries)


def test_parameters_are_those_of_the_paper() -> None:
    """`ep` has D^2 / d_out + Q D, `attention` 2 D^2 + D; each classifier has C (width + 1)."""
    encoder = small_encoder()
    probes = ReadoutProbes(encoder, small_configs(encoder, "linear", "ep", "attention"), (17, 128), CLASSES)
    counts = [probes.describe(index) for index in range(3)]
    assert [count["readout_parameters"] for count in counts] == [0, 128 * 128 + 4 * 128, 2 * 128 * 128 + 128]
    assert all(count["parameters"] == count["readout_parameters"] + CLASSES * 129 for count in counts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small `cls` encoder, saved."""
    path, encoder = tmp_path_factory.mktemp("attentive"), small_encoder()
    torch.save({"teacher": encoder.state_dict(), "encoder": encoder_description(encoder.config)}, path / "cls.pth")
    return path


def words(folder: Path, output: Path, *more: object) -> list[str]:
    shared = ["--pretrained_weights", folder / "cls.pth", "--data_path", "scenes:40:32", "--output_dir", output]
    return list(map(str, [*shared, "--num_workers", 0, "--device", "cpu", "--batch_size_per_gpu", 16, *more]))


SIZES = ("--sparo_slots", 3, "--sparo_slot_dim", 5, "--sparo_key_dim", 7, "--ep_queries", 4, "--attention_heads", 8)
NAME = "cls_scenes-40-32"
ALL = ("--probe", "linear", "sparo", "ep", "attention", "--lr", 0.5, 5, *SIZES)


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    return eval_linear.main(words(folder, folder / "all", "--fast", "--epochs", 2, *ALL))


def test_the_result_is_a_table_of_accuracy_against_parameters(
    folder: Path, result: dict[str, Any], capsys: pytest.CaptureFixture
) -> None:
    saved = json.loads((folder / "all" / f"probes_{folder.name}_{NAME}.json").read_text())
    assert [(row["probe"], row["lr"]) for row in saved["results"]] == [
        (kind, rate) for kind in ("linear", "sparo", "ep", "attention") for rate in (0.5, 5)
    ]
    assert saved["feature"]["tokens"] == [17, 128]
    assert saved["feature"]["readouts"]["ep"]["slot_dim"] == 32
    again = eval_linear.main(words(folder, folder / "all", "--fast", "--epochs", 2, *ALL))  # nothing is left to train
    assert again["results"] == result["results"]
    printed = capsys.readouterr().out
    assert f"{saved['results'][0]['parameters']:,}" in printed
    assert [line.split()[0] for line in printed.splitlines()[1:5]] == ["linear", "sparo", "ep", "attention"]


def test_saved_probes_are_tested_again_with_equal_accuracy(folder: Path, result: dict[str, Any]) -> None:
    tested = eval_linear.main(words(folder, folder / "all", "--evaluate", *ALL))
    for row, trained in zip(tested["results"], result["results"], strict=True):
        assert (row["probe"], row["lr"], row["top1"]) == (trained["probe"], trained["lr"], trained["top1"])
        assert row["loss"] == pytest.approx(trained["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sparo", "ep", "attention"])
def test_a_trained_probe_is_an_encoder_that_is_drawn_scored_and_evaluated(
    kind: str, folder: Path, result: dict[str, Any]
) -> None:
    path, output = folder / "all" / f"probe_{kind}_{folder.name}_{NAME}.pth", folder / f"drawn_{kind}"
    encoder = load_encoder(path)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(encoder.backbone(images), small_encoder().backbone(images))
        read: ReadoutOutput = encoder.readout_output(images)
    assert read.attention.shape == (2, {"sparo": 3, "ep": 4, "attention": 8}[kind], 17)
    shared = ["--pretrained_weights", str(path), "--device", "cpu", "--num_workers", "0", "--output_dir", str(output)]
    visualize_attention.main(shared)
    assert np.load(output / "attention.npy").shape[1] == read.attention.shape[1]
    scored = run("slots score", [*shared, "--data_path", "scenes:12:32", "--num_images", "4"])
    assert scored["num_maps"] == read.attention.shape[1]
    near = eval_knn.main([*shared, "--data_path", "scenes:40:32", "--nb_knn", "5"])
    assert near["results"][0]["k"] == 5


@pytest.mark.slow
def test_live_crops_train_and_a_stopped_training_resumes_as_if_it_had_not_been(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--epochs", 3, "--probe", "ep", "sparo", "--lr", 1, *SIZES)
    whole = eval_linear.main(words(folder, tmp_path / "whole", *options))
    save = ProbeRun.save

    def stop(self: ProbeRun) -> None:
        save(self)
        if self.epoch == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ProbeRun, "save", stop)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            eval_linear.main(words(folder, tmp_path / "parts", *options))
    assert eval_linear.main(words(folder, tmp_path / "parts", *options))["results"] == whole["results"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--probe", "ep", "--ep_queries", "7"),
            "--ep_queries x --ep_reduction is 7, .* divide .* 128; 8 and 4 are the nearest",
        ),
        (("--probe", "attention", "--attention_heads", "3"), "--attention_heads is 3, .*; 2 and 4 are the nearest"),
        (("--probe", "ep", "--n_last_blocks", "1"), "--n_last_blocks and --avgpool_patchtokens do not apply"),
        (("--probe", "ep", "--avgpool_patchtokens", "true"), "do not apply to --probe"),
        (("--probe", "ep", "--epochs", "3", "--warmup_epochs", "3"), "--warmup_epochs 3 leaves nothing of --epochs 3"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(
    options: tuple[str, ...], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as end:
        eval_linear.main(words(folder, tmp_path, "--fast", *options))
    assert end.value.__context__ is not None
    assert pytest.importorskip("re").search(message, str(end.value.__context__))


def test_a_read_out_that_takes_raw_tokens_leaves_nothing_to_probe() -> None:
    with pytest.raises(ValueError, match="readout 'gap_then_norm' leaves none"):
        small_configs(small_encoder("gap_then_norm"), "ep")


def test_attention_needs_heads_as_wide_as_a_token_together() -> None:
    with pytest.raises(ValueError, match="num_slots=2, slot_dim=5: the heads together are as wide as a token, 128"):
        small_encoder("attention")
    with pytest.raises(ValueError, match="5 heads do not divide tokens of width 24"):
        AttentionReadout(D, 5)

"""The options of the demos; no torch here, so that `--help` is fast."""

from dino_sparo.runtime.cli import Group, Option, Parser

OPTIONS: Group = {
    "method": Option("dino", "Objective to train with.", choices=("dino", "clip", "oc-clip")),
    "models": Option(
        None,
        "Models to compare: read-outs with dino and clip, by default sparo; with oc-clip oc_clip, cls and sparo, by "
        "default all.",
        str,
        nargs="+",
    ),
    "seeds": Option([0], "Random seeds; one training run each."),
    "output_dir": Option(None, "Where everything is written; by default in output/."),
    "device": Option("cpu", "auto, cpu or cuda.", str),
    "short": Option(False, "Train for a minute only, to see that all parts work."),
}


def demo_parser() -> Parser:
    """The options of all demos."""
    return Parser({"demo": OPTIONS})

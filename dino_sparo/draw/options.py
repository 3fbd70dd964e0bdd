"""The options of pictures; no torch here, so that `--help` is fast."""

from dino_sparo.runtime.cli import Group, Option, whole_number

FIGURE_FORMAT = Option("png", "File format of figures with text.", choices=("png", "pdf", "svg"))
SHOW_CHANNELS: Group = {
    "show_channels": Option(
        [],
        "Channels that pictures show, counted from 0: one as grey, or three as red, green and blue, each "
        "stretched from its 2nd to its 98th percentile. By default RGB is unchanged, and other images show "
        "their first three channels, or the first.",
        whole_number,
    )
}

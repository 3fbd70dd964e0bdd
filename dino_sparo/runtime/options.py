"""The options of devices and processes."""

from dino_sparo.runtime.cli import Group, Option, positive_number

PRECISIONS = ("bf16", "fp16", "fp32", "tf32")  # the keys of `precision.PRECISIONS`, which imports torch
DEVICE_OPTION = Option("auto", "auto (cuda if there is a GPU, else cpu), cpu, cuda or cuda:N.", str)
DEVICE: Group = {
    "device": DEVICE_OPTION,
    "num_workers": Option(
        32, "Processes that load images, per GPU; at most one for each core that the process may use."
    ),
    "dist_url": Option("env://", "Address at which the processes meet; not needed under torchrun and Slurm.", str),
    "dist_timeout_min": Option(
        10.0, "Minutes that a process waits for other processes, or for images, before the run ends.", positive_number
    ),
    "local_rank": Option(0, "Ignored. Older launchers set this option; the rank comes from the environment."),
}

"""Submit a training run to Slurm, one task per GPU, requeued when it is preempted, at its time limit and after faults.

    python run_with_submitit.py --nodes 1 --ngpus 8 --partition gpu --timeout_min 2800 \\
        --data_path imagenet/train --output_dir runs/vits16

Takes every option of the trainer (`--module`, by default `main_dino.py`) and a few of Slurm's. A job whose machines
Slurm takes back saves between two steps, is requeued under the same number, and goes on from that very step.
"""

from dino_sparo.submit import get_submission_parser, main

__all__ = ["get_submission_parser", "main"]

if __name__ == "__main__":
    main(prog="run_with_submitit.py")

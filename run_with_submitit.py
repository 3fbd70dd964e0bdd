"""A training -> a Slurm job, requeued when it is preempted, at its time limit and after faults.

    python run_with_submitit.py --nodes 2 --ngpus 8 --partition gpu --timeout 2800 \\
        --data_path imagenet/train --output_dir runs/vits16

The job has one task per GPU. `dino-sparo submit` is the same command; `dino_sparo/submit.py` says more.
"""

from dino_sparo.submit import SCRIPT, get_submission_parser, main

__all__ = ["get_submission_parser", "main"]

if __name__ == "__main__":
    main(prog=SCRIPT)

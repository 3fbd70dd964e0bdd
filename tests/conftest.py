"""What holds for every test: one thread per process.

The tests' tensors are small. A second thread gains nothing on them, and costs milliseconds in every operation where it
has to wait for a core that another process keeps busy.
"""

import os

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)

"""Who started this process, and collectives over real processes."""

import logging
import math
import multiprocessing
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from two_ranks import TwoRanks

from dino_sparo.data.batch import Batch
from dino_sparo.distillation.loss import DINOLoss
from dino_sparo.runtime import collectives, exits, faults, launch
from dino_sparo.runtime.collectives import (
    all_gather_object,
    all_gather_ragged,
    all_reduce_sum,
    barrier,
    broadcast_object,
)
from dino_sparo.runtime.exits import errors_in_one_line
from dino_sparo.runtime.faults import FAULT_STATUS, FaultError, PeerError, UserError
from dino_sparo.runtime.launch import (
    Distributed,
    detect_launcher,
    fresh_store,
    init_distributed,
    is_main,
    rank,
    require_one_device_type,
    select_device,
    world_size,
)
from dino_sparo.submit import FAULT_STATUSES
from dino_sparo.training.loop import NonFiniteLossError, UnreadReports, raise_nonfinite
from dino_sparo.training.objective import StepReport


def test_the_log_names_a_process_in_plain_words() -> None:
    """The bug: the line that begins a run ended with the repr of a dataclass."""
    gpu = torch.device("cuda", 0)
    assert str(Distributed(0, 1, torch.device("cpu"))) == "cpu"
    assert str(Distributed(3, 8, gpu)) == "cuda:0, rank 3 of 8"


TASK = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("plain", 0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, ("torchrun", 3, 4, 1)),
        (TASK, ("slurm", 5, 8, 1)),
        # torchrun inside a Slurm task: torchrun's word is the nearer one
        ({**TASK, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, ("torchrun", 3, 4, 1)),
        # a variable left over in the shell
        ({"SLURM_PROCID": "0"}, ("plain", 0, 1, 0)),
        # a batch script: Slurm sets the first task's variables there, but no step runs
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, ("plain", 0, 1, 0)),
        # the shell that salloc opens on a node
        ({**TASK, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, ("plain", 0, 1, 0)),
        # srun from within an interactive shell: the shell's variables are inherited
        ({**TASK, "SLURM_PTY_PORT": "33333", "SLURM_JOB_NAME": "interactive"}, ("slurm", 5, 8, 1)),
        ({**TASK, "SLURM_STEP_NUM_TASKS": "1"}, ("plain", 0, 1, 0)),
        # variables of a batch script for other programs
        ({**TASK, "WORLD_SIZE": "8"}, ("slurm", 5, 8, 1)),
        ({"RANK": "", "WORLD_SIZE": "1", "LOCAL_RANK": ""}, ("plain", 0, 1, 0)),
    ],
)
def test_the_launcher_is_found_in_the_environment(
    environment: dict[str, str], expected: tuple[str, int, int, int]
) -> None:
    assert detect_launcher(environment) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "has WORLD_SIZE='2', but no RANK, LOCAL_RANK; start the processes with torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "but no LOCAL_RANK"),
        ({"RANK": "0", "WORLD_SIZE": "zwei", "LOCAL_RANK": "0"}, "WORLD_SIZE='zwei'.*whole numbers"),
        ({"WORLD_SIZE": "zwei"}, "has WORLD_SIZE='zwei', but no RANK"),
        ({"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "RANK='5'.*from 0 to WORLD_SIZE - 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'.*from 0"),
    ],
)
def test_variables_of_torchrun_that_contradict_each_other_are_refused(
    environment: dict[str, str], message: str
) -> None:
    """The bug: such a process trained alone, or was requeued for ever."""
    with pytest.raises(UserError, match=message):
        detect_launcher(environment)


def test_a_shell_that_is_a_slurm_step_runs_one_process() -> None:
    assert detect_launcher({**TASK, "SLURM_PROCID": "0"}, has_terminal=True) == ("plain", 0, 1, 0)


def test_a_process_alone_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "7")
    place = init_distributed("cpu")
    assert (place.rank, place.world_size, place.device) == (0, 1, torch.device("cpu"))
    assert not dist.is_initialized()
    assert (rank(), world_size(), is_main()) == (0, 1, True)
    values = torch.arange(5)
    assert all_reduce_sum(values) is values
    assert all_gather_ragged(values) is values
    barrier()


def test_devices_that_do_not_exist_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"asks for GPU 3, but this process sees 2"):
        select_device("cuda", local_rank=3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"asks for GPU 1, but this process sees 1"):
        select_device("cuda", local_rank=1, may_share=False)
    with pytest.raises(ValueError, match="unknown device 'tpux'"):
        select_device("tpux")


def test_products_are_exact_on_a_device_until_an_option_says_otherwise() -> None:
    """The maps of `visualize_attention.py` were in TF32 where an environment allows it, as NVIDIA's containers do."""
    torch.set_float32_matmul_precision("medium")
    try:
        select_device("cpu")
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("job", "attempt", "step", "port"),
    [
        ("7", "0", "0", 10_007),
        ("19999", "0", "0", 29_999),
        ("20000", "0", "0", 10_000),
        ("4200000123", "0", "0", 10_123),  # 64 bits in newer versions of Slurm
        ("7", "1", "0", 11_016),  # requeued
        ("7", "3", "0", 13_034),
        ("7", "0", "2", 10_069),  # a second step beside the first
        ("19999", "1", "1", 11_039),
    ],
)
def test_each_attempt_of_a_job_has_a_port_of_its_own_below_the_ephemeral_ones(
    job: str, attempt: str, step: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for name, value in {
        "MASTER_ADDR": "node1",
        "SLURM_JOB_ID": job,
        "SLURM_RESTART_COUNT": attempt,
        "SLURM_STEP_ID": step,
    }.items():
        monkeypatch.setenv(name, value)
    launch._set_slurm_rendezvous()
    assert int(os.environ["MASTER_PORT"]) == port < 32_768
    assert os.environ["MASTER_ADDR"] == "node1"
    launch._set_slurm_rendezvous()
    assert int(os.environ["MASTER_PORT"]) == port
    monkeypatch.setenv("MASTER_PORT", "4711")  # a user's word counts
    launch._set_slurm_rendezvous()
    assert os.environ["MASTER_PORT"] == "4711"


def test_attempts_that_share_a_store_do_not_read_each_others_addresses() -> None:
    store, second = dist.HashStore(), timedelta(seconds=30)
    for attempt in ("first", "second"):  # torch's own keys would be those of the first attempt
        with ThreadPoolExecutor(3) as threads:
            parts = list(threads.map(lambda number: fresh_store(store, number, 3, second), range(3)))
        assert not any(part.check(["address0"]) for part in parts)
        parts[0].set("address0", attempt)
        assert [part.get("address0").decode() for part in parts] == [attempt] * 3


def test_a_process_that_does_not_come_is_named() -> None:
    for number, message in ((0, r"processes \[1, 2\] did not join"), (1, "process 0 did not join")):
        with pytest.raises(RuntimeError, match=message):
            fresh_store(dist.HashStore(), number, 3, timedelta(seconds=0.1))


def test_processes_on_gpus_and_on_cpus_refuse_each_other() -> None:
    """The bug: a node without GPUs took its CPU and waited for gloo's group, the others for NCCL's."""
    devices = [torch.device(kind) for kind in ("cuda", "cuda", "cpu")]

    def join(store: dist.Store, number: int, device: torch.device) -> str:
        try:
            require_one_device_type(store, number, 3, device)
        except ValueError as error:
            return str(error)
        return ""

    for kinds, refused in ((devices, True), (devices[:1] * 3, False), (devices[2:] * 3, False)):
        store = dist.HashStore()
        with ThreadPoolExecutor(3) as threads:
            messages = set(threads.map(partial(join, store), range(3), kinds))
        assert len(messages) == 1
        assert bool(re.match(r"rank 0 computes on cuda of \S+, but rank 2 on cpu of", messages.pop())) == refused


@pytest.mark.parametrize(("name", "value"), [("SLURM_JOB_GPUS", "0"), ("SLURM_GPUS_ON_NODE", "8")])
def test_a_job_that_has_gpus_does_not_take_the_cpu_unasked(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: where the driver is broken, the run went on for days at a hundredth of its speed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "0")
    assert select_device("auto").type == "cpu"
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"Slurm gave this job GPUs \({value}\), but torch sees none"):
        select_device("auto")
    assert select_device("cpu").type == "cpu"


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([("", False), ("disk is away", True)], FaultError),
        ([("no such folder", False), ("disk is away", True)], PeerError),
        ([("no such folder", False), ("", False)], PeerError),
    ],
)
def test_the_fault_of_another_rank_is_a_fault_here_too(
    others: list[tuple[str, bool]], expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: the others said that the user must mend something, so the job did not start again."""
    monkeypatch.setattr(collectives, "all_gather_object", lambda own: [own, *others])
    with (
        pytest.raises(expected, match="looking for a checkpoint failed on"),
        collectives.all_or_none("looking for a checkpoint"),
    ):
        pass


def test_processes_that_share_a_gpu_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: the job started again ten times, though only its user could mend it."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("NCCL error: ncclInvalidUsage. Last error: Duplicate GPU detected : rank 1 and rank 0")

    monkeypatch.setattr(launch.dist, "rendezvous", refuse)
    with pytest.raises(ValueError, match=r"process 1 of 2 cannot use cpu: NCCL error: .* needs a GPU of its own"):
        launch._join("env://", 1, 2, torch.device("cpu"), timedelta(seconds=1))


def test_a_group_that_cannot_be_joined_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FaultError, match=r"process 1 of 2 cannot reach the other processes within 0\.01 minutes"):
        init_distributed("cpu", timeout_min=0.01)


def _message_of_one_bad_loss(number: int, others_see_it: bool) -> str:
    """What this rank says when the loss of rank 1 alone is not finite; with fp16's scale the others do not see that."""
    source = SimpleNamespace(location=lambda index: f"image{index}.jpg")
    objective = SimpleNamespace(noun="image", source=source, counters={}, count=lambda batch: {})
    batch = Batch(views=[], labels=torch.tensor([0]), indices=torch.tensor([10 + number]), corrupt=[])
    unread = UnreadReports(objective)
    is_bad = number == 1
    for step, loss, nonfinite in ((17, 2.5, 0.0), (18, math.nan if is_bad else 2.5, float(is_bad or others_see_it))):
        unread.add(step, StepReport(torch.tensor(loss), torch.tensor(nonfinite), {"lr": 0.125}), [batch])
    try:
        raise_nonfinite(unread, objective, epoch=3)
    except NonFiniteLossError as error:
        return str(error)
    return "went on"


def _center_and_messages() -> tuple[torch.Tensor, list[str]]:
    loss = DINOLoss(5, 2, 0.04, 0.04, 0, 1)
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank()))
    loss(logits, logits, 0)
    return loss.center, [_message_of_one_bad_loss(rank(), others_see_it) for others_see_it in (True, False)]


def test_two_ranks_share_one_center_and_say_the_same_of_a_bad_loss(two_ranks: TwoRanks) -> None:
    together = torch.cat([torch.randn(4, 5, generator=torch.Generator().manual_seed(number)) for number in range(2)])
    for center, messages in two_ranks(_center_and_messages):
        assert torch.allclose(center, 0.1 * together.mean(dim=0, keepdim=True), atol=1e-7)
        for message in messages:
            assert "the loss is not finite at step 17 (epoch 3), lr 0.125" in message
            assert "rank 1: loss nan, images image11.jpg" in message
            assert "image10.jpg" not in message


SHORT_MIN = 0.02  # --dist_timeout_min


def _wait_for_rank_0(number: int, folder: str, results: "multiprocessing.Queue") -> None:
    """Rank 0 works longer than a collective waits; at last, longer than the control group waits."""
    torch.set_num_threads(1)
    import os

    os.environ.update(RANK=str(number), WORLD_SIZE="2", LOCAL_RANK=str(number))
    init_distributed("cpu", dist_url=f"file://{folder}/rendezvous", timeout_min=SHORT_MIN)

    def work(factor: float = 2.0) -> None:
        if number == 0:
            time.sleep(factor * 60 * SHORT_MIN)

    work()
    found: list[object] = [all_gather_object(number)]
    work()
    found.append(broadcast_object(number))
    work()
    barrier()
    collectives.on_rank_0(work, "saving")
    found.append(all_reduce_sum(torch.tensor([number + 1])).tolist())  # the main group is whole
    try:
        work(1 + launch.CONTROL_FACTOR)
        barrier()
    except FaultError as error:
        found.append(str(error))
    results.put((number, found))


@pytest.mark.alone
@pytest.mark.slow
def test_ranks_that_wait_for_rank_0_do_not_run_into_the_time_out_of_collectives(tmp_path: Path) -> None:
    """With NCCL all ranks would die at its time-out while rank 0 saves, downloads or classifies on its CPU."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    peers = [context.Process(target=_wait_for_rank_0, args=(number, str(tmp_path), results)) for number in range(2)]
    for peer in peers:
        peer.start()
    found = dict(results.get(timeout=120) for _ in peers)
    for peer in peers:
        peer.join(timeout=60)
    assert found[0][:3] == found[1][:3] == [[0, 1], 0, [3]]
    assert "another process did not answer for 0.12 minutes" in found[1][3]
    assert "Run the same command to resume" in found[1][3]


CUDA_HINT = " CUDA kernel errors might be asynchronously reported at some other API call"
HARDWARE = [
    "CUDA error: uncorrectable ECC error encountered" + CUDA_HINT,
    "CUDA error: unspecified launch failure" + CUDA_HINT,
    "CUDA error: uncorrectable NVLink error detected during the execution",
    "CUDA error: unknown error" + CUDA_HINT,
    "CUDA error: all CUDA-capable devices are busy or unavailable",
    "Caught AcceleratorError in pin memory thread for device 0. CUDA error: uncorrectable ECC error encountered",
]
MISTAKES = [
    "CUDA error: device-side assert triggered" + CUDA_HINT,
    "CUDA error: invalid device ordinal",
    "The size of tensor a (3) must match the size of tensor b (5)",
    "reading /data/uncorrectable/Xid.jpg",
]


@pytest.mark.parametrize("text", HARDWARE)
@pytest.mark.parametrize("kind", ["RuntimeError", "AcceleratorError"])
def test_an_error_of_the_gpu_ends_with_the_status_that_is_requeued(
    text: str, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError(text) if kind == "RuntimeError" else _accelerator_error(text)
    ended: list[int] = []
    monkeypatch.setattr(exits.os, "_exit", ended.append)
    with pytest.raises(SystemExit), errors_in_one_line(logging.getLogger("t")), faults.explain_faults(10.0):
        raise error
    assert ended == [FAULT_STATUS]
    assert FAULT_STATUS in FAULT_STATUSES, "the batch script requeues it"
    (record,) = caplog.records
    assert record.message.startswith(f"the GPU of rank 0 on {socket.gethostname()} failed")
    assert "Run the same command to resume" in record.message


def _accelerator_error(text: str) -> RuntimeError:
    kind = getattr(torch, "AcceleratorError", None)  # since torch 2.8
    if kind is None:
        pytest.skip("this torch has no AcceleratorError")
    return kind(text)


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_the_program_is_not_taken_for_broken_hardware(text: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(text)) as caught, faults.explain_faults(10.0):
        raise RuntimeError(text)
    assert not isinstance(caught.value, FaultError)


def test_an_error_of_nccl_about_another_rank_is_a_fault_of_that_rank() -> None:
    text = "NCCL error in: NCCLUtils.cpp, ncclRemoteError: a network error or a remote process exiting prematurely"
    message = "another process died; its log may say why"
    with pytest.raises(FaultError, match=message), faults.explain_faults(10.0):
        raise dist.DistBackendError(text)

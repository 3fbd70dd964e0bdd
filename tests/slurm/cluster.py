"""A real Slurm cluster on one machine, for tests: munged, slurmctld and one slurmd per node, all on loopback.

    apt-get install -y --no-install-recommends slurm-wlm munge
    eval "$(python tests/slurm/cluster.py start /tmp/cluster)"    # sets SLURM_CONF and PATH in this shell
    sinfo; srun -n2 hostname; python run_with_submitit.py ...
    python tests/slurm/cluster.py stop /tmp/cluster

Root and ordinary users can do this alike: nothing outside the given folder is written, /etc/slurm is neither read nor
changed, and no systemd, cgroup or database takes part. CPUs, GPUs and memory of the nodes are made up. Several clusters
live side by side in folders and on ports of their own. A partition `main` is preempted by a partition `high`.

What differs from a cluster in a data center: a killed job is gone after seconds instead of half a minute, a requeued
job starts after about ten seconds instead of two minutes, and `sacct`, which needs a database, is a stand-in that
answers the one question submitit asks.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PACKAGES = "slurm-wlm munge"
SYSTEM_PATH = ":/usr/sbin:/sbin"  # where Debian puts the daemons, outside an ordinary user's PATH
START_SECONDS, STOP_SECONDS = 30.0, 15.0
CPUS, GPUS, MEMORY_MB = 128, 8, 4_000_000  # of a node; production-sized requests fit
FIRST_PORT, PORT_STRIDE, NUM_BLOCKS = 30_000, 16, 170  # below the ports that outgoing connections take

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
# Ports of rendezvous follow from job ids: two clusters must not count alike.
FirstJobId={port}
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until the credential of its last start has expired: 2 minutes by default, and 3 s is too
# little for Slurm, which then takes its default.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
Epilog={folder}/bin/epilog
PropagateResourceLimits=NONE
# The nodes' CPUs and memory are what is written below, not what the machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
GresTypes=gpu
# Schedule at once, and refuse what can never run.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
EnforcePartLimits=ALL
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# Else a preempted job hears SIGCONT and SIGTERM alone, not the signal it asked for with --signal.
SlurmctldParameters=preempt_send_user_signal
KillWait={kill_wait_s}
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=30
# Ended jobs stay in memory, where the stand-in for sacct finds them.
MinJobAge=86400
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs={cpus} RealMemory={memory_mb} Gres=gpu:{gpus}
PartitionName=main Nodes=ALL Default=YES DefaultTime=10 MaxTime=INFINITE PriorityTier=1 GraceTime={grace_s}
PartitionName=high Nodes=ALL DefaultTime=10 MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""

SCRIPT = """\
#!/bin/sh
exec env -i PATH="$PATH{system_path}" SLURM_CONF={conf} {python} -I -S {file} {arguments}
"""


def missing_programs() -> list[str]:
    """Which of Slurm's and MUNGE's programs are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=os.environ["PATH"] + SYSTEM_PATH) is None]


def free_port(first_block: int = 0) -> int:
    """The first of a block of ports that nobody listens on.

    Args:
        first_block: where to begin to look, so that neighbours who look at the same time find different ones.
    """
    for block in range(first_block, first_block + NUM_BLOCKS):
        port = FIRST_PORT + block % NUM_BLOCKS * PORT_STRIDE
        with contextlib.ExitStack() as sockets:
            try:
                for offset in range(PORT_STRIDE):
                    listener = sockets.enter_context(socket.socket())
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    listener.bind(("127.0.0.1", port + offset))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no {PORT_STRIDE} free ports in a row from {FIRST_PORT} on")


def wait_until(condition: Callable[[], object], seconds: float, what: str, pause: float = 0.05) -> None:
    """Look again and again until a condition holds.

    Raises:
        TimeoutError: it does not within that time; says what was waited for.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(pause)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def environment_of(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty if it is gone or somebody else's."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def processes() -> Iterator[int]:
    """All processes of this machine."""
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


@dataclass(frozen=True)
class Cluster:
    """A cluster in a folder.

    Attributes:
        folder: holds all its files; the path must be short enough for a socket's name in it (about 90 characters).
        port: of slurmctld; the nodes' daemons have the ports after it.
        num_nodes: of `CPUS` CPUs and `GPUS` GPUs each.
        kill_wait_s: between SIGTERM and SIGKILL when a job is ended.
        grace_s: that a preempted job has left.
    """

    folder: Path
    port: int = FIRST_PORT
    num_nodes: int = 2
    kill_wait_s: int = 2
    grace_s: int = 20

    @property
    def node_names(self) -> list[str]:
        """Addresses, which resolve everywhere, so that a job can use its first node's name as a rendezvous."""
        return [f"127.0.0.{number}" for number in range(1, self.num_nodes + 1)]

    @property
    def conf(self) -> Path:
        """The configuration file, which all of Slurm's commands look for in SLURM_CONF."""
        return self.folder / "etc" / "slurm.conf"

    def environment(self, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """An environment for Slurm's commands: this cluster, whatever cluster or job we may be in ourselves."""
        others = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_")
        kept = {name: value for name, value in base.items() if not name.startswith(others)}
        path = f"{self.folder}/bin:{base.get('PATH', os.defpath)}{SYSTEM_PATH}"
        return {**kept, "SLURM_CONF": str(self.conf), "PATH": path}

    def command(self, *words: str, timeout: float = 30.0) -> str:
        """What one of Slurm's commands prints.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        done = subprocess.run(
            words, env=self.environment(), check=True, capture_output=True, text=True, timeout=timeout
        )
        return done.stdout

    def start(self) -> None:
        """Start the daemons and wait until all nodes are idle.

        Raises:
            RuntimeError: programs are missing, or the nodes do not come up; the daemons' last words are in the message.
        """
        if missing_programs():
            raise RuntimeError(f"{', '.join(missing_programs())} not found: apt-get install {PACKAGES}")
        self._write_files()
        munge = self.folder / "munge"
        daemons = [
            # --force: its socket may lie below a folder that is open to one user only, as pytest's are.
            [
                *("munged", "--force", "--num-threads=2", f"--key-file={munge}/key", f"--socket={munge}/socket"),
                *(f"--pid-file={self.folder}/run/munged.pid", f"--log-file={self.folder}/log/munged.log"),
                f"--seed-file={munge}/seed",
            ],
            ["slurmctld", "-f", str(self.conf)],
            *(["slurmd", "-N", name, "-f", str(self.conf)] for name in self.node_names),
        ]
        try:
            for daemon in daemons:
                # They go on in the background, so that their output must not be a pipe that somebody reads to its end.
                with (self.folder / "log" / "start.log").open("a") as log:
                    subprocess.run(daemon, env=self.environment(), check=True, stdout=log, stderr=log, timeout=30)
            wait_until(self._is_ready, START_SECONDS, "the nodes to become idle")
        except (subprocess.SubprocessError, TimeoutError) as error:
            words = [f"{path.name}: {path.read_text()[-1000:]}" for path in (self.folder / "log").iterdir()]
            self.stop()
            raise RuntimeError(f"the cluster did not start ({error})\n" + "\n".join(words)) from error

    def _is_ready(self) -> bool:
        try:
            states = self.command("sinfo", "--noheader", "--Node", "--partition=main", "--format=%t", timeout=10)
        except subprocess.SubprocessError:  # slurmctld does not answer yet
            return False
        return states.split() == ["idle"] * self.num_nodes

    def _write_files(self) -> None:
        for name in ("bin", "etc", "gpu", "log", "munge", "run", "state", *(f"spool/{n}" for n in self.node_names)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        last = self.port + self.num_nodes
        configuration = CONFIGURATION.format(
            **{"host": socket.gethostname().split(".")[0], "user": _user_name(), "folder": self.folder},
            **{"port": self.port, "nodes": ",".join(self.node_names), "ports": f"[{self.port + 1}-{last}]"},
            **{"cpus": CPUS, "gpus": GPUS, "memory_mb": MEMORY_MB},
            **{"kill_wait_s": self.kill_wait_s, "grace_s": self.grace_s},
        )
        self.conf.write_text(configuration)
        # A GPU is a device file, one each; a link to /dev/null is enough of one.
        devices = [self.folder / "gpu" / str(number) for number in range(GPUS)]
        for device in devices:
            device.unlink(missing_ok=True)
            device.symlink_to("/dev/null")
        (self.conf.parent / "gres.conf").write_text(
            "AutoDetect=off\n" + "".join(f"Name=gpu File={device}\n" for device in devices)
        )
        (self.conf.parent / "cgroup.conf").write_text("CgroupAutomount=no\n")
        (self.conf.parent / "plugstack.conf").write_text("")  # beside ours, else /etc/slurm's is read
        self._write_script("sacct", '"$@"')
        self._write_script("epilog", f'{shlex.quote(str(self.folder))} "$SLURM_JOB_ID" "$SLURMD_NODENAME"')

    def _write_script(self, name: str, arguments: str) -> None:
        words = [shlex.quote(str(word)) for word in (self.conf, sys.executable, Path(__file__).resolve())]
        text = SCRIPT.format(
            system_path=SYSTEM_PATH, conf=words[0], python=words[1], file=words[2], arguments=f"{name} {arguments}"
        )
        script = self.folder / "bin" / name
        script.write_text(text)
        script.chmod(0o755)

    def stop(self) -> None:
        """End the jobs, then the daemons, then whatever the jobs left behind; the folder stays."""
        if self._daemon("slurmctld.pid") is not None:
            with contextlib.suppress(subprocess.SubprocessError, TimeoutError):
                self.command("scancel", "--state=PENDING", f"--user={_user_name()}")
                self.command("scancel", "--full", "--signal=KILL", f"--user={_user_name()}")
                self.command("scancel", f"--user={_user_name()}")
                wait_until(lambda: not self.command("squeue", "--noheader"), STOP_SECONDS, "the jobs to end")
        names = [*(f"slurmd.{name}.pid" for name in self.node_names), "slurmctld.pid", "munged.pid"]
        pids = [pid for pid in map(self._daemon, names) if pid is not None]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not any(map(is_alive, pids)), STOP_SECONDS, "the daemons to end")
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)
        kill_orphans(self.conf)

    def _daemon(self, pid_file: str) -> int | None:
        """The process of a pid file, if it lives and is ours: its command line names the folder."""
        try:
            pid = int((self.folder / "run" / pid_file).read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return pid if str(self.folder).encode() in command and is_alive(pid) else None


def _user_name() -> str:
    return subprocess.run(["id", "-un"], check=True, capture_output=True, text=True).stdout.strip()


def kill_orphans(conf: Path, job: str | None = None, node: str | None = None) -> None:
    """Kill what is left of the jobs of a cluster, found by the environment.

    Slurm follows its jobs' processes from parent to child, so it loses the children of a task that was killed.

    Args:
        conf: the cluster's configuration file.
        job: only of this job.
        node: only on this node.
    """
    for pid in processes():
        variables = environment_of(pid)
        if variables.get("SLURM_CONF") != str(conf) or "SLURM_JOB_ID" not in variables or pid == os.getpid():
            continue
        if job not in (None, variables["SLURM_JOB_ID"]) or node not in (None, variables.get("SLURMD_NODENAME")):
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def answer_sacct(words: list[str]) -> None:
    """Print what `sacct -o JobID,State,NodeList --parsable2 -j ID [-j ID ...]` would, from slurmctld's memory."""
    print("JobID|State|NodeList")
    for job in (word for flag, word in pairwise(words) if flag == "-j"):
        shown = subprocess.run(["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True).stdout
        for line in shown.splitlines():
            fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
            nodes = fields.get("NodeList", "(null)")
            print(f"{fields['JobId']}|{fields['JobState']}|{'None assigned' if nodes == '(null)' else nodes}")


def main() -> None:
    """Start or stop a cluster from a shell; `sacct` and `epilog` are called by Slurm and submitit."""
    action, *words = sys.argv[1:] or ["--help"]
    if action == "sacct":
        return answer_sacct(words)
    if action == "epilog":
        return kill_orphans(Cluster(Path(words[0])).conf, job=words[1], node=words[2])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["start", "stop"])
    parser.add_argument("folder", type=Path, help="All files of the cluster.")
    parser.add_argument("--nodes", type=int, default=2, help="Nodes, each with its own slurmd.")
    parser.add_argument("--port", type=int, default=None, help="First of the ports; a free one if not given.")
    args = parser.parse_args()
    folder = args.folder.resolve()
    if args.action == "stop":
        return Cluster(folder, num_nodes=args.nodes).stop()
    cluster = Cluster(folder, args.port or free_port(), args.nodes)
    cluster.start()
    variables = cluster.environment()
    print("\n".join(f"export {name}={shlex.quote(variables[name])}" for name in ("SLURM_CONF", "PATH")))


if __name__ == "__main__":
    main()

"""A real Slurm on this machine, all of it in one directory: munged, slurmctld, one slurmd a virtual
node. No systemd, no control groups, no fixed paths; every process of it is ended by its pid.

Waits are short: a job is killed 5 s after it was told to end, a slurmd that says nothing is down
after 10 s, and a job that is put back may start again after 5 s (its credential's time).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import wait_until

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sinfo")

CONF = """\
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={path}/munge/sock,cred_expire=5
StateSaveLocation={path}/state
SlurmdSpoolDir={path}/spool/%n
SlurmctldPidFile={path}/slurmctld.pid
SlurmdPidFile={path}/slurmd-%n.pid
SlurmctldLogFile={path}/slurmctld.log
SlurmdLogFile={path}/slurmd-%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={path}/jobs.txt
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
KillWait=5
MinJobAge=600
SlurmctldTimeout=10
SlurmdTimeout=10
ReturnToService=2
JobRequeue=1
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=ALL Default=YES DefaultTime=10 PriorityTier=10 PreemptMode=OFF
PartitionName=scavenge Nodes=ALL DefaultTime=10 PriorityTier=1 PreemptMode=REQUEUE GraceTime=4
"""
NODE = "NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000"


def why_not() -> str:
    """Returns why this machine cannot run it; empty when it can."""
    if os.geteuid():
        return "a Slurm of one's own needs root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    packages = "apt-get install slurmctld slurmd slurm-client munge"
    return f"no {', '.join(missing)} here ({packages})" if missing else ""


class Slurm:
    """Nodes n1 .. nN, partitions `main` (pre-empts) and `scavenge` (is pre-empted, comes again)."""

    def __init__(self, path: Path, num_nodes: int) -> None:
        self.path, self._num = path, num_nodes
        self.env = {**os.environ, "SLURM_CONF": str(path / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        """Start it, and wait until every node is idle."""
        for folder in ("munge", "state", *(f"spool/n{i}" for i in range(1, self._num + 1))):
            (self.path / folder).mkdir(parents=True, mode=0o755)
        key = self.path / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        host, port = socket.gethostname().partition(".")[0], _free_ports(1 + self._num)
        nodes = [NODE.format(i=i, host=host, port=port + i) for i in range(1, self._num + 1)]
        text = CONF.format(host=host, port=port, path=self.path, nodes="\n".join(nodes))
        (self.path / "slurm.conf").write_text(text)
        munge = self.path / "munge"
        options = (f"--key-file={key}", f"--socket={munge}/sock", f"--pid-file={munge}/pid")
        more = (f"--log-file={munge}/log", f"--seed-file={munge}/seed")
        self._start("munged", "--foreground", "--force", *options, *more)
        wait_until(lambda: (munge / "sock").exists(), "munged is there")
        self._start("slurmctld", "-D")
        for i in range(1, self._num + 1):
            self._start("slurmd", "-D", "-N", f"n{i}", name=f"slurmd-n{i}")
        idle = ("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D")
        wait_until(lambda: self.ask(*idle, check=False) == str(self._num), "every node is idle")

    def _start(self, *argv: str, name: str = "") -> None:
        name = name or argv[0]
        with (self.path / f"{name}.out").open("wb") as out:
            self._daemons[name] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.env
            )

    def ask(self, *argv: str, check: bool = True) -> str:
        """Returns the output of a client of Slurm."""
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout.strip()

    def jobs(self, name: str, states: str = "RUNNING") -> dict[str, str]:
        """Jobs of a name that are in such a state: id to node."""
        listing = self.ask("squeue", "-h", "-n", name, "-t", states, "-o", "%i %N")
        lines = (line.partition(" ") for line in listing.splitlines())
        return {job: node for job, _, node in lines}

    def submit(self, *argv: str) -> str:
        """Id of a new job."""
        return self.ask("sbatch", "--parsable", "-o", f"{self.path}/job-%j.out", *argv)

    def kill(self, node: str) -> None:
        """SIGKILL to a node's slurmd; its steps go on."""
        self._daemons[f"slurmd-{node}"].kill()

    def back(self, node: str) -> None:
        """Start a killed slurmd again."""
        self._daemons[f"slurmd-{node}"].wait()
        self._start("slurmd", "-D", "-N", node, name=f"slurmd-{node}")

    def down(self) -> None:
        """Cancel what runs, end the daemons, munged last; then what a killed slurmd left."""
        jobs = self.ask("squeue", "-h", "-o", "%i", check=False).split()
        if jobs:
            self.ask("scancel", *jobs, check=False)
            with contextlib.suppress(AssertionError):
                wait_until(lambda: not self.ask("squeue", "-h", "-o", "%i", check=False), "", 20)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in self.strays():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def strays(self) -> list[int]:
        """Processes of its jobs, and keepers of its steps, that are still there."""
        conf = f"SLURM_CONF={self.path}/slurm.conf".encode()
        pids = []
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                in_job = any(word.startswith(b"SLURM_JOB_ID=") for word in env)
                keeps = Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd")
                if (in_job and conf in env) or (keeps and self._logs_here(pid)):
                    pids.append(pid)
        return pids

    def _logs_here(self, pid: int) -> bool:
        fds = Path(f"/proc/{pid}/fd")
        return any(os.readlink(fd).startswith(f"{self.path}/") for fd in fds.iterdir())


@contextmanager
def slurm(path: Path, num_nodes: int) -> Iterator[Slurm]:
    """A Slurm for the length of a block."""
    made = Slurm(path, num_nodes)
    try:
        made.up()
        yield made
    finally:
        made.down()


def _free_ports(num: int) -> int:
    """The first of so many ports in a row, free most probably."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            first: int = probe.getsockname()[1]
        try:
            for port in range(first, first + num):
                socket.create_server(("127.0.0.1", port)).close()
        except (OSError, OverflowError):
            continue
        return first

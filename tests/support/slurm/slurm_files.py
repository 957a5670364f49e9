"""The configuration files of the test cluster, all below one directory."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Sequence
from pathlib import Path

GPUS_PER_NODE = 8

_SLURM_CONF = """
ClusterName=slipway
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge/socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
TmpFS={directory}/tmp.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
ReturnToService=2
KillWait=30
KillOnBadExit=1
JobRequeue=1
FirstJobId={first_job}
PropagateResourceLimits=NONE
GresTypes=gpu
PlugStackConfig={directory}/plugstack.conf
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd_port}
AccountingStoragePass={directory}/munge/socket
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
_NODE_CONF = (
    "NodeName={0} NodeHostname={0} NodeAddr=127.0.0.1 Port={1} CPUs=16 RealMemory=64000 Gres=gpu:8 State=UNKNOWN"
)

_SLURMDBD_CONF = """
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={dbd_port}
SlurmUser=root
LogFile={directory}/slurmdbd.log
PidFile={directory}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={db_port}
StorageUser=root
StorageLoc=slurm_acct_db
"""

_GRES_CONF = """
AutoDetect=off
NodeName={nodes} Name=gpu File={directory}/dev/nvidia[0-{last}]
"""


def write_files(directory: Path, nodes: Sequence[str]) -> int:
    """Make the directories and files that the daemons read; returns the port for the database."""
    for name in (
        "munge",
        "state",
        "dev",
        "db",
        "containers",
        *(f"{kind}.{node}" for kind in ("tmp", "spool") for node in nodes),
    ):
        (directory / name).mkdir(parents=True, mode=0o755)
    for index in range(GPUS_PER_NODE):
        (directory / "dev" / f"nvidia{index}").symlink_to("/dev/null")
    host = socket.gethostname()
    ctld_port, dbd_port, db_port, *node_ports = free_ports(3 + len(nodes))
    values = {
        "directory": directory,
        "host": host,
        "ctld_port": ctld_port,
        "dbd_port": dbd_port,
        "db_port": db_port,
        "first_job": random.randint(1000, 900_000),  # an id is not met again by a later cluster
        "last": GPUS_PER_NODE - 1,
    }
    lines = "\n".join(_NODE_CONF.format(node, port) for node, port in zip(nodes, node_ports, strict=True))
    _write(directory / "slurm.conf", _SLURM_CONF.format(**values, nodes=lines))
    _write(directory / "slurmdbd.conf", _SLURMDBD_CONF.format(**values))
    _write(directory / "gres.conf", _GRES_CONF.format(**values, nodes=",".join(nodes)))
    _write(directory / "plugstack.conf", f"required {directory}/container_options.so {directory}/containers\n")
    _write(directory / "cgroup.conf", "CgroupAutomount=no\n")
    addresses = "".join(f"127.0.1.{index} {node}\n" for index, node in enumerate(nodes, 1))
    _write(directory / "hosts", f"127.0.0.1 localhost {host}\n{addresses}")
    return db_port


def _write(file: Path, content: str) -> None:
    file.write_text(content.lstrip())
    file.chmod(0o600 if file.name == "slurmdbd.conf" else 0o644)


def free_ports(count: int) -> list[int]:
    """Different TCP ports without a listener now, below those that the kernel gives to connections."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(range(20_000, 30_000), 20 * count):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
        return found[:count]

"""The rank of this process: torchrun's variables, or those of Slurm and MPI launchers under torchrun's names."""

import os
import re
import zlib
from collections.abc import Mapping

# The names of WORLD_SIZE, RANK, LOCAL_RANK and LOCAL_WORLD_SIZE under each MPI launcher.
MPI = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
)
RANKS_LIMIT = 2**20
FIRST_PORT, PORTS = 20_000, 10_000  # below the ephemeral ports that systems assign to clients


class LauncherError(ValueError):
    """The launcher's variables are wrong on this rank. It cannot tell the other ranks, so each rank prints its own line."""


def launched(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """torchrun's variables for this process; variables that are not set are derived from those of Slurm or MPI.

    The variables of a task of a Slurm step (`srun`) or of a rank of `mpirun` or `mpiexec` are ignored if WORLD_SIZE is set
    and differs from their number of ranks. MASTER_ADDR becomes the first host of the Slurm step; ranks of MPI on several
    hosts do not know it. MASTER_PORT is derived from the id of the job. {} if no launcher started this process.
    """
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    own = {name: environment[name] for name in names if environment.get(name)}
    others = _of_mpi(environment) or _of_slurm(environment)
    if others.get("WORLD_SIZE", "1") == "1" or own.get("WORLD_SIZE", others["WORLD_SIZE"]) != others["WORLD_SIZE"]:
        others = {}
    return {name: value for name, value in (others | own).items() if value}


def launched_ranks() -> int:
    """The number of ranks that a launcher started; 1 without a launcher. LauncherError if WORLD_SIZE is not a number."""
    return _integer("WORLD_SIZE", launched().get("WORLD_SIZE", "1"), 1, RANKS_LIMIT)


def this_rank() -> int:
    """The rank of this process; 0 if it runs alone."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


def adopt_launcher() -> None:
    """Set torchrun's variables in this process's environment, where torch and DeepSpeed read them.

    LauncherError if RANK is missing or not below WORLD_SIZE.
    """
    variables, world = launched(), launched_ranks()
    if world > 1 and "RANK" not in variables:
        raise LauncherError(
            f"there are {world} ranks (WORLD_SIZE, or the tasks of Slurm or MPI), and RANK is not set: set WORLD_SIZE, "
            "RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as torchrun does, or WORLD_SIZE=1 for a process that runs alone"
        )
    why = f", as WORLD_SIZE is {variables.get('WORLD_SIZE', 'not set')}"
    _integer("RANK", variables.get("RANK", "0"), 0, world - 1, why)
    _integer("LOCAL_RANK", variables.get("LOCAL_RANK", "0"), 0, RANKS_LIMIT)
    os.environ.update(variables)


def meeting_address() -> tuple[str, int]:
    """(MASTER_ADDR, MASTER_PORT). LauncherError if one is missing, or the port is invalid."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise LauncherError(f"rank {this_rank()}: {name} is not set: set it on all ranks to where rank 0 listens")
    return os.environ["MASTER_ADDR"], _integer("MASTER_PORT", os.environ["MASTER_PORT"], 1, 2**16 - 1)


def ranks_that_slurm_did_not_start(environment: Mapping[str, str] = os.environ) -> int:
    """The number of tasks of a Slurm job if this process is its batch script or shell, not a task; otherwise 0."""
    tasks = environment.get("SLURM_NTASKS", "")
    is_alone = not environment.get("WORLD_SIZE") and not _of_mpi(environment) and _is_outside_step(environment)
    return int(tasks) if is_alone and tasks.isdecimal() and tasks != "1" else 0


def _of_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for a rank of MPI, {} if it is none. Under Open MPI, Slurm's variables describe its daemons."""
    for size, rank, local_rank, local_size in MPI:
        if size in environment and (size.startswith("OMPI") or local_size in environment):
            sources = dict(WORLD_SIZE=size, RANK=rank, LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE=local_size)
            variables = {name: environment.get(source, "") for name, source in sources.items()}
            if variables["LOCAL_WORLD_SIZE"] == variables["WORLD_SIZE"]:
                variables["MASTER_ADDR"] = "127.0.0.1"
            return variables | {"MASTER_PORT": _port(environment.get("PMIX_NAMESPACE", ""))}
    return {}


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for a task of a Slurm step, {} if this process is none."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "")
    if not tasks or _is_outside_step(environment):
        return {}
    variables = dict(WORLD_SIZE=tasks)
    variables["RANK"], variables["LOCAL_RANK"] = (
        environment.get(f"SLURM_{name}", "") for name in ("PROCID", "LOCALID")
    )
    if (environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES")) == "1":
        variables |= {"LOCAL_WORLD_SIZE": tasks, "MASTER_ADDR": "127.0.0.1"}
    else:
        hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        variables["MASTER_ADDR"] = first_host(hosts) or environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
    step = (environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return variables | {"MASTER_PORT": _port(".".join(step))}


def _is_outside_step(environment: Mapping[str, str]) -> bool:
    """Return True in a batch script or a shell of `salloc`: these see the job's number of tasks, but belong to no step."""
    is_in_job = "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
    return is_in_job and environment.get("SLURM_PROCID", "0") == "0"


def first_host(hosts: str) -> str:
    """The first of a list of hosts in Slurm's notation: node003 of "node[003-007,9],login"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def _port(job: str) -> str:
    """A port derived from the id of the job: the same on all its ranks, and probably not that of another job."""
    return str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS)


def _integer(name: str, text: str, low: int, high: int, why: str = "") -> int:
    """The value of a variable; LauncherError unless it is an integer from `low` to `high`."""
    if not text.isdecimal() or not low <= int(text) <= high:
        raise LauncherError(f"{name}={text[:60]} must be an integer from {low} to {high}{why}")
    return int(text)

"""What starts an exported folder? Commands and files for torchrun, Slurm, MPI, a rank table, Kubernetes, SkyPilot."""

from autopar.launch.job import Job, job_of
from autopar.launch.kubernetes import job_yaml, pytorchjob_yaml
from autopar.launch.mpirun import mpirun_command
from autopar.launch.rank_table import rank_table, rank_table_script
from autopar.launch.skypilot import task_yaml
from autopar.launch.slurm import sbatch_script
from autopar.launch.torchrun import torchrun_command

__all__ = [
    "Job",
    "job_of",
    "job_yaml",
    "mpirun_command",
    "pytorchjob_yaml",
    "rank_table",
    "rank_table_script",
    "sbatch_script",
    "task_yaml",
    "torchrun_command",
]

"""How a process finds its place in a job: flags, environment; and the ready files for clusters."""

import re
import subprocess

import pytest
import yaml
from jobs import ROOT, TINY

from train import cli
from train.cluster import Cluster, find_cluster
from train.config import DistributedConfig

SLURM = {
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
}
JOBSET = {"JAX_COORDINATOR_ADDRESS": "a-0-0.a:55527", "JAX_NUM_PROCESSES": "4", "JOB_COMPLETION_INDEX": "2"}


@pytest.mark.parametrize(
    ("environment", "cluster"),
    [
        ({}, None),
        (SLURM, Cluster(num_processes=2, process_id=1)),
        ({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_JOB_ID": "5", "SLURM_NTASKS": "2"}, None),  # in an allocation, but not started by srun
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"}, Cluster(num_processes=3, process_id=0)),
        (JOBSET, Cluster(coordinator_address="a-0-0.a:55527", num_processes=4, process_id=2)),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, Cluster()),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    ],
)
def test_the_environment_tells_the_place_in_the_job(environment, cluster):
    assert find_cluster(DistributedConfig(), environment) == cluster
    assert find_cluster(DistributedConfig(cluster="none"), environment) is None


def test_flags_come_before_the_environment():
    flags = DistributedConfig(coordinator_address="h:1", num_processes=2, process_id=0)
    assert find_cluster(flags, SLURM) == Cluster(coordinator_address="h:1", num_processes=2, process_id=0)
    assert find_cluster(DistributedConfig(cluster="jax"), {}) == Cluster()


@pytest.mark.parametrize(
    ("changes", "environment", "message"),
    [
        ({"num_processes": 2}, {}, "must be given together; got coordinator address None, number of processes 2"),
        ({"coordinator_address": "h", "num_processes": 2, "process_id": 0}, {}, "'h' must be HOST:PORT of process 0"),
        ({"coordinator_address": "h:1", "num_processes": 2, "process_id": 2}, {}, "number them 0 to 1"),
        ({}, {"JAX_NUM_PROCESSES": "4"}, "JOB_COMPLETION_INDEX.* must be given together"),
        ({}, {**SLURM, "SLURM_PROCID": "one"}, "SLURM_PROCID='one' must be a whole number"),
    ],
)
def test_an_incomplete_place_is_refused(changes, environment, message):
    with pytest.raises(ValueError, match=message):
        find_cluster(DistributedConfig(**changes), environment)


CLUSTERS = ROOT / "docs" / "clusters"


@pytest.mark.parametrize("name", ["slurm.sbatch", "tpu.sh"])
def test_the_scripts_for_clusters_are_bash(name):
    subprocess.run(["bash", "-n", CLUSTERS / name], check=True)


def test_the_manifest_for_kubernetes_fits_together():
    manifest = yaml.safe_load((CLUSTERS / "jobset.yaml").read_text())
    workers = manifest["spec"]["replicatedJobs"][0]
    job = workers["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    values = {entry["name"]: entry["value"] for entry in container["env"]}
    name = manifest["metadata"]["name"]
    assert values["JAX_COORDINATOR_ADDRESS"].startswith(f"{name}-{workers['name']}-0-0.{name}:")
    assert int(values["JAX_NUM_PROCESSES"]) == job["parallelism"] == job["completions"]
    assert find_cluster(DistributedConfig(), {**values, "JOB_COMPLETION_INDEX": "3"}).process_id == 3
    subprocess.run(["bash", "-n", "-c", container["args"][0]], check=True)


@pytest.mark.parametrize("name", ["slurm.sbatch", "tpu.sh", "jobset.yaml"])
def test_the_flags_in_the_files_for_clusters_exist(name, capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", TINY, "--help"])
    known = set(re.findall(r"--[a-z][a-z.-]+", capsys.readouterr().out))
    text = (CLUSTERS / name).read_text()
    command = text[text.index("-m train run") :]
    flags = set(re.findall(r"--(?:distributed\.[a-z-]+|run-dir|resume)", text)) | set(
        re.findall(r"(?<=\s)--[a-z][a-z.-]+", command.split("CODE=")[0].split("resources:")[0])
    )
    assert "--run-dir" in flags
    assert flags <= known

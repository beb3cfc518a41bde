"""Settings of Hydra's other launchers, and the titan settings that replace them. Free of torch.

docs/slurm.md has the same as a table.
"""

from __future__ import annotations

LAUNCHERS = {
    "submitit_slurm": "slurm",
    "submitit_local": "local",
    "joblib": "local",
    "ray": "local",
    "rq": "local",
}
"""Other launchers by name, and titan's launcher that replaces them."""
SUBMITIT = {
    "timeout_min": "cluster.time=VALUE (minutes)",
    "nodes": "cluster.nodes=VALUE",
    "gpus_per_node": "cluster.devices_per_node=VALUE",
    "gpus_per_task": "cluster.devices_per_node=VALUE (a task is a rank, with a GPU of its own)",
    "tasks_per_node": "cluster.devices_per_node=VALUE (a task is a rank)",
    "cpus_per_task": "cluster.cpus_per_rank=VALUE",
    "cpus_per_gpu": "cluster.cpus_per_rank=VALUE",
    "mem_gb": "cluster.node_memory_gib=VALUE (of a node)",
    "mem_per_gpu": "cluster.sbatch={mem-per-gpu:VALUE}",
    "mem_per_cpu": "cluster.sbatch={mem-per-cpu:VALUE}",
    "array_parallelism": "hydra.launcher.at_once=VALUE",
    "partition": "cluster.partition=VALUE",
    "account": "cluster.account=VALUE",
    "qos": "cluster.qos=VALUE",
    "constraint": "cluster.constraint=VALUE",
    "exclude": "cluster.exclude=VALUE",
    "gres": "cluster.gres=VALUE",
    "exclusive": "cluster.exclusive=VALUE",
    "signal_delay_s": "cluster.signal_seconds=VALUE",
    "max_num_timeout": "cluster.requeues=VALUE",
    "additional_parameters": "cluster.sbatch=VALUE",
    "setup": "cluster.setup=VALUE",
    "srun_args": "cluster.srun=VALUE",
    "name": "name=VALUE",
    "submitit_folder": "",
    "stderr_to_stdout": "",
    "comment": "",
    "use_srun": "",
    "n_jobs": "hydra.launcher.at_once=VALUE (hydra/launcher=local)",
}
"""Keys of hydra-submitit-launcher, and joblib's, with the setting of titan's; empty where titan handles it itself."""


def describe_setting(key: str, typed: str) -> str | None:
    """Return the error message for a setting of another launcher; None for other settings.

    Args:
        key: its dotted name.
        typed: the whole override.
    """
    name = key.removeprefix("hydra.launcher.")
    if name == key or name not in SUBMITIT:
        return None
    if not SUBMITIT[name]:
        return f"{typed}: is another launcher's, and titan sees to it itself; leave it out."
    value = typed.partition("=")[2] or "VALUE"
    return f"{typed}: is another launcher's; titan's is {SUBMITIT[name].replace('VALUE', value)}."


def describe_launcher(choice: str) -> str | None:
    """Return the error message for another launcher; None for an unknown name."""
    if choice not in LAUNCHERS:
        return None
    return (
        f"hydra/launcher={choice}: titan launches runs itself; give hydra/launcher={LAUNCHERS[choice]} "
        "(docs/slurm.md has the names of its settings)."
    )

"""What the ranks of test_train_ranks.py do; each function is called on every rank."""

import warnings

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dpflash.train import report
from dpflash.train.config import Parallelism, TrainingConfig
from dpflash.train.launch import Launch
from dpflash.train.ranks import Team
from dpflash.train.run import Interrupted, TrainingRun

# As the fixture `empty_picture` does.
report._draw = lambda figure, report: figure.set_size_inches(1, 1)


class Connected(Launch):
    """A launch whose process group exists already."""

    def connect(self, config):
        self.parallel.check(config)
        context = self.parallel.context_parallel
        shape = (dist.get_world_size() // context, context)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "context"))
        return Team(self.parallel, mesh)


def train(group, out, parallel, config=None, stop_at=None, stopped_rank=0):
    """A job of a config, or the one in `out`; rank `stopped_rank` stops after a step."""
    launch = Connected(Parallelism(**parallel))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if config is None:
            job = TrainingRun.resume(out, launch=launch)
        else:
            job = TrainingRun.start(TrainingConfig(**config), out, launch)

    def should_stop():
        return job.step == stop_at and dist.get_rank() == stopped_rank

    try:
        report = job.run(should_stop=should_stop)
    except Interrupted:
        report = None
    parameters = job._team.whole_state(job.model)
    return {
        "step": job.step,
        "epsilon": job.epsilon,
        "state": {k: v for k, v in vars(job.state).items() if k != "baseline"},
        "report": report,
        "lost_steps": job.lost_steps,
        "warnings": [str(w.message) for w in caught],
        "parameters": {k: v.detach().numpy() for k, v in parameters.items()},
    }


def refused(group, out, parallel, config):
    """The error of a start on this rank; `config` has one entry for each of them."""
    try:
        TrainingRun.start(
            TrainingConfig(**config[dist.get_rank()]), out, Connected(Parallelism(**parallel))
        )
    except ValueError as error:
        return str(error)
    return None

"""A controller's view of many workers: it sends batches of the whole group and gets results in row
order.

group = local_group(MegatronWorker(cfg))        # inside torchrun, on every rank
group = start_ray_group(cfg, processes=8)       # from controller.ray_actors: Ray actors
log_probs = group.forward(batch).result()
metrics = group.forward_backward(batch, loss="ppo").result()
group.optim_step(lr=1e-6)
"""

from megatron_vlm.controller.rank_worker import WorkerError
from megatron_vlm.controller.torchrun import local_group
from megatron_vlm.controller.worker_group import WorkerGroup

__all__ = ["WorkerError", "WorkerGroup", "local_group"]

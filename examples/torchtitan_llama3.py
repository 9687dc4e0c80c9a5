"""torchtitan's Llama 3 8B, with every step in memory and a checkpoint on disk every thousand steps: its configuration.

    PYTHONPATH=examples keepstep run --nproc-per-node=8 --rdzv-id=llama3-1 -m torchtitan.train \\
        --module torchtitan_llama3 --config llama3_8b_kept --hf_assets_path ./assets/hf/Llama-3.1-8B

The same without a configuration of one's own: `--module llama3 --config llama3_8b --override.imports
keepstep.frameworks.torchtitan.keep`. Start the same line again after a failure of the whole job.
"""

from __future__ import annotations

from torchtitan.models.llama3.config_registry import llama3_8b
from torchtitan.trainer import Trainer


def llama3_8b_kept() -> Trainer.Config:
    config = llama3_8b()
    config.override.imports.append(("keepstep.frameworks.torchtitan.keep", {"every": 1}))  # +
    config.checkpoint.enable = True
    config.checkpoint.interval = 1000
    return config

"""Downstream tasks: EleutherAI's lm-eval on our models, with data from the hub or from local files.

Prompts, scoring and metrics are lm-eval's. Three folders have further task definitions:

    tasks/both     `paper7`, the group of the paper's seven tasks, and `held_out_continuation`:
                   which of four continuations follows a held-out passage; needs no data set
    tasks/hub      CommonsenseQA scored like the other tasks, which lm-eval lacks
    tasks/local    the paper's tasks for files on disk, with lm-eval's prompts and metrics

`tasks` loads tasks and their items; `scores` lets lm-eval run them on our models.
"""

try:
    import datasets
    import lm_eval
except ModuleNotFoundError as error:
    package = error.name.partition(".")[0].replace("_", "-")
    raise ModuleNotFoundError(
        f"evaluation needs the package {package}: pip install 'twell[evaluate]'"
    ) from None

from twell.evaluate.scores import run
from twell.evaluate.tasks import (
    after_blank,
    before_blank,
    held_out_docs,
    held_out_texts,
    local_docs,
)

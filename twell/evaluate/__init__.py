"""Downstream tasks: EleutherAI's lm-eval on our models, with data from the hub or from local files.

Prompts, scoring and metrics are lm-eval's. Three folders of task definitions stand beside its own:

    tasks/both     `paper7`, the group of the paper's seven tasks, and `held_out_continuation`: the
                   true continuation of a held-out passage among four, which needs no data set
    tasks/hub      what lm-eval does not have: CommonsenseQA scored like the other tasks
    tasks/local    the same for files on disk, with the prompts and metrics of lm-eval's definitions

The modules: `adapter` lets lm-eval run our models, `tasks` loads tasks and their items, `scores`
runs both.
"""

try:
    import datasets
    import lm_eval
except ModuleNotFoundError as error:
    package = error.name.partition(".")[0].replace("_", "-")
    raise ModuleNotFoundError(
        f"evaluation needs the package {package}: pip install 'twell[evaluate]'"
    ) from None

from twell.evaluate.scores import _describe, rolling, run
from twell.evaluate.tasks import (
    TASKS,
    after_blank,
    before_blank,
    held_out_docs,
    held_out_texts,
    local_docs,
)

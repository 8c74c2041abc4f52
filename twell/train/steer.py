"""What brings activity to the wanted share: the L1 coefficient, or else the threshold.

Without an L1 term it is the threshold. Activity follows the coefficient slowly, which changes by a
factor after each stage of `l1_stage_steps`. It follows the threshold at once, which changes with
each row of the log: while activity falls by itself, a stage would be late. Ours.
"""

from __future__ import annotations

import dataclasses
import math

from torch import nn

from twell.config import TrainConfig

AIM = 0.98  # of the wanted share, to end at
FEW = 0.8  # of the wanted share; fewer active neurons at the end are worth a word
MOST = 3  # factors `l1_growth` of a change
# Of the coefficient: the ratio to the aim that changes it by one factor, in how many stages too few
# active neurons may come back by themselves, and the least over the configured one.
AWAY, BACK, LEAST = 1.25, 5, 1e-3
HALF = 0.5  # of the neurons are above a threshold of 0, about


class Steering:
    """The coefficient or threshold of a run of `active_share`; of another run it stays.

    name: the field of the configuration that is changed. factor: by how much, so far.
    """

    def __init__(self, config: TrainConfig, model: nn.Module):
        self.config, self.model = config, model
        self.name = "l1_coefficient" if config.l1_coefficient else "threshold"
        self.factor = 1.0
        self.share: float | None = None  # of active neurons, at the end of the last stage

    @property
    def value(self) -> float:
        return getattr(self.config, self.name) * self.factor

    def after(self, step: int, active: float) -> None:
        """Change the value if its period ends with this step. active: the mean since the last row.

        Nothing changes before the L1 term would act in full, and after the last step.
        """
        config = self.config
        begins = step > config.l1_zero_steps + config.l1_warmup_steps
        by_l1 = self.name == "l1_coefficient"
        if not (config.active_share and begins) or step % config.steering_steps:
            return
        share = active / config.intermediate_size
        if step < config.steps:
            stages = (config.steps - step) // config.l1_stage_steps  # still to come
            change = self.of_coefficient(share, stages) if by_l1 else self.of_threshold(share)
            self.factor = max(self.factor * change, LEAST if by_l1 else 0.0)
            self.apply()
        self.share = share

    def of_coefficient(self, share: float, stages: int) -> float:
        """Return the factor of the L1 coefficient after a stage with a share of active neurons.

        It rises if too many neurons are active, and will be if their share changes in the next
        stage as it did in this one. It falls if too few are, and will be in BACK stages, or in
        those that are left. A share AWAY times the wanted one changes it by `l1_growth`, one
        further off by more.
        """
        change = 0.0 if self.share is None else share - self.share
        aim = AIM * self.config.active_share
        expected = share + change * (1 if share > aim else max(1, min(BACK, stages)))
        if (share > aim) != (expected > aim):
            return 1.0
        ratio = max((share + change) / aim, AWAY**-MOST)
        return self.config.l1_growth ** min(math.log(ratio, AWAY), MOST)

    def of_threshold(self, share: float) -> float:
        """Return the factor of the threshold after a row with a share of active neurons.

        The share is taken to fall exponentially with the threshold, from HALF at 0.
        """
        most = self.config.l1_growth**MOST
        aim, share = AIM * self.config.active_share, min(max(share, 1e-9), 0.999 * HALF)
        return min(max(math.log(aim / HALF) / math.log(share / HALF), 1 / most), most)

    def apply(self) -> None:
        """Give a threshold to the layers, and to the configuration that is saved."""
        if self.name == "threshold" and self.config.active_share:
            self.model.config.activation_threshold = self.value
            for ffn in self.model.ffns:
                ffn.act = dataclasses.replace(ffn.act, threshold=self.value)

    def missed(self, active: list[float]) -> str | None:
        """Return what to say where another share is active in the end. active: of each layer."""
        config = self.config
        share = sum(active) / (config.num_layers * config.intermediate_size)
        if share > 1.01 * config.active_share:  # nearer, it would print the wanted share
            remedy = f"raise tokens, {self.name} or l1_growth"
        elif share < FEW * config.active_share:
            remedy = f"lower {self.name}, with which it began, or raise tokens"
        else:
            return None
        return f"{share:.1%} of the neurons are active, not {config.active_share:.1%}: {remedy}"

    def state(self) -> dict:
        return {"l1_factor": self.factor, "share": self.share}

    def restore(self, state: dict) -> None:
        self.factor, self.share = state["l1_factor"], state["share"]
        self.apply()

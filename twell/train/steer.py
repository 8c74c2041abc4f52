"""Steers activity to the wanted share: by the L1 coefficient, or else by the threshold.

Activity follows the coefficient slowly, so the coefficient changes after stages of
`l1_stage_steps`. Without an L1 term the threshold is steered. Activity follows it at once, so it
changes with each row of the log: activity also falls by itself. Ours.
"""

from __future__ import annotations

import dataclasses
import math

from torch import nn

from twell.config import TrainConfig

AIM = 0.98  # of the wanted share
FEW = 0.8  # of the wanted share; a run that ends below it says so
MOST = 3  # a change has at most this power of `l1_growth`
AWAY = 1.25  # ratio of activity to the aim that changes the coefficient by `l1_growth`
BACK = 5  # stages in which activity may return to the aim by itself
LEAST = 1e-3  # of the configured coefficient
HALF = 0.5  # of the neurons are above a threshold of 0, approximately


class Steering:
    """The L1 coefficient or threshold of a run: the field `name`, times `factor`."""

    def __init__(self, config: TrainConfig, model: nn.Module):
        self.config, self.model = config, model
        self.name, self.stage_steps = "threshold", config.log_every
        if config.l1_coefficient:
            self.name, self.stage_steps = "l1_coefficient", config.l1_stage_steps
        self.factor = 1.0
        self.share: float | None = None  # of active neurons, at the end of the last stage

    @property
    def value(self) -> float:
        return getattr(self.config, self.name) * self.factor

    def after(self, step: int, active: float) -> None:
        """Change the value if its stage ends with this step, and the L1 term acts in full.

        active: mean active neurons a token and layer since the last row.
        """
        config = self.config
        begun = step > config.l1_zero_steps + config.l1_warmup_steps
        due = step % self.stage_steps == 0 and step < config.steps
        if not (config.active_share and begun and due):
            return
        share = active / config.intermediate_size
        if self.name == "threshold":
            self.factor *= self.of_threshold(share)
        else:
            stages = (config.steps - step) // config.l1_stage_steps  # still to come
            self.factor = max(self.factor * self.of_coefficient(share, stages), LEAST)
        self.share = share
        self.apply()

    def of_coefficient(self, share: float, stages: int) -> float:
        """Return the factor of the L1 coefficient after a stage with a share of active neurons.

        It stays 1 while the change of the last stage would reach the aim by itself: from above in
        one more stage, from below in BACK stages or the `stages` left.
        """
        change = 0.0 if self.share is None else share - self.share
        aim = AIM * self.config.active_share
        expected = share + change * (1 if share > aim else max(1, min(BACK, stages)))
        if (share > aim) != (expected > aim):
            return 1.0
        ratio = max((share + change) / aim, AWAY**-MOST)
        return self.config.l1_growth ** min(math.log(ratio, AWAY), MOST)

    def of_threshold(self, share: float) -> float:
        """Return its factor after a row, as if the share fell exponentially from HALF at 0."""
        most = self.config.l1_growth**MOST
        aim, share = AIM * self.config.active_share, min(max(share, 1e-9), 0.999 * HALF)
        return min(max(math.log(aim / HALF) / math.log(share / HALF), 1 / most), most)

    def apply(self) -> None:
        """Set a steered threshold in the layers, and in the configuration that is saved."""
        if self.name == "threshold" and self.config.active_share:
            self.model.config.activation_threshold = self.value
            for ffn in self.model.ffns:
                ffn.act = dataclasses.replace(ffn.act, threshold=self.value)

    def missed(self, active: list[float]) -> str | None:
        """Return a line if the run ended away from its share. active: neurons of each layer."""
        wanted = self.config.active_share
        share = sum(active) / len(active) / self.config.intermediate_size
        if wanted and share > 1.01 * wanted:  # nearer, both would print as the same number
            remedy = f"raise tokens, {self.name} or l1_growth"
        elif share < FEW * wanted:
            remedy = f"lower {self.name}, with which it began, or raise tokens"
        else:
            return None
        return f"{share:.1%} of the neurons are active, not {wanted:.1%}: {remedy}"

    def state(self) -> dict:
        return {"l1_factor": self.factor, "share": self.share}

    def restore(self, state: dict) -> None:
        self.factor, self.share = state["l1_factor"], state["share"]
        self.apply()

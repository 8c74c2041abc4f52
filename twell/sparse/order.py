"""An order of the tokens of a call, in which tokens that activate the same neurons are neighbours.

Work by unions grows with the neurons that any of 64 consecutive tokens activates, and y of a token
does not depend on its neighbours. So a layer may compute its tokens in any order: x is gathered as
it is read, and y as it is used. Compiled code fuses both with what is before and behind the layer.
twell.order_tokens finds an order for a whole model. For inference; ours, not the paper's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from twell.sparse.observe import Result

ROUNDS = 8  # of k-means


class TokenOrder(NamedTuple):
    """order [M] int64: the token at each place. places [M] int64: the place of each token."""

    order: Tensor
    places: Tensor

    @classmethod
    def by(cls, keys: Tensor) -> TokenOrder:
        """Return the order of tokens by `keys` [M]; equal ones stay in text order."""
        order = keys.argsort(stable=True)
        numbers = torch.arange(len(order), device=order.device)
        return cls(order, torch.empty_like(order).scatter_(0, order, numbers))

    def to(self, device: torch.device) -> TokenOrder:
        return TokenOrder(self.order.to(device), self.places.to(device))

    def fits(self, rows: Tensor) -> bool:
        """Whether the rows [M, K] can be in this order: by number and device."""
        return len(self.order) == len(rows) and self.order.device == rows.device

    def take(self, rows: Tensor) -> Tensor:
        """Return the rows [M, K] in this order."""
        return rows.index_select(0, self.order)

    def undo(self, result: Result) -> Result:
        """Return the result of rows in this order for tokens as they were given.

        Counts of active neurons keep the order; statistics do not depend on it.
        """
        l1 = None if result.l1 is None else result.l1.index_select(0, self.places)
        return result._replace(y=result.y.index_select(0, self.places), l1=l1, hidden=None)


def similar_side_by_side(vectors: Tensor, clusters: int = 64) -> Tensor:
    """Return the place [V] int64 of each of V vectors [V, K] in a list where neighbours are alike.

    The list goes from one cluster of directions (k-means) to the one left that is most similar, and
    within a cluster by number. The same vectors give the same list.
    """
    vectors = torch.nn.functional.normalize(vectors.float().nan_to_num(), dim=1)
    clusters, device = min(clusters, len(vectors)), vectors.device
    chosen = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(0))[:clusters]
    centres = vectors[chosen.to(device)]
    for _ in range(ROUNDS):
        nearest = (vectors @ centres.t()).argmax(1)
        members = torch.nn.functional.one_hot(nearest, clusters).to(vectors.dtype)
        # A product: sums by index_add_ would have another order in each run.
        centres = torch.nn.functional.normalize(members.t() @ vectors, dim=1)
    nearest = (vectors @ centres.t()).argmax(1)
    similar, at = (centres @ centres.t()).cpu(), 0
    number, left = torch.zeros(clusters, dtype=torch.int64), torch.ones(clusters, dtype=torch.bool)
    for place in range(clusters):
        number[at], left[at] = place, False
        at = int(similar[at].masked_fill(~left, -torch.inf).argmax())
    return TokenOrder.by(number.to(device)[nearest]).places

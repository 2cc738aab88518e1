"""The multiple-choice knapsack: one item of each group, the least loss within a cost.

    minimise  sum loss[g, chosen g]   subject to   sum cost[g, chosen g] <= limit

A Lagrangian gives a bound and a first choice (Fisher 1981; Kellerer, Pferschy, Pisinger, Knapsack Problems, chapter 11). Items that the
bound excludes from any better choice are dropped, and what is left is solved exactly, group by group, by keeping the choices that no
other one beats in both cost and loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["knapsack"]

MOST_STATES = 3_000        # partial choices; beyond it the best by their bounds are kept, and the result may be a very little off


def knapsack(costs: Tensor, losses: Tensor, limit: float) -> list[int] | None:
    """The chosen item of each group, None where even the cheapest ones cost more than ``limit``.

    ``costs`` and ``losses`` are float64 [groups, items]; an infinite cost stands for an item that is not there.

    >>> knapsack(torch.tensor([[1., 2.], [1., 3.]]), torch.tensor([[5., 1.], [9., 2.]]), 4.0)
    [0, 1]
    """
    if not costs.numel():
        return []
    costs, losses = costs.double(), losses.double()
    if float(costs.amin(1).sum()) > limit:
        return None
    price, best = _lagrangian(costs, losses, limit)
    best = _filled(costs, losses, limit, best)
    chosen_loss = float(losses.gather(1, best[:, None]).sum())
    reduced = losses + price * costs
    least = reduced.amin(1)
    bound = float(least.sum()) - price * limit
    slack = 1e-12 * max(1.0, abs(chosen_loss))
    open_ = reduced - least[:, None] < chosen_loss - bound + slack                     # only these can be in a better choice
    free = torch.nonzero(open_.sum(1) > 1).flatten()
    only = torch.where(open_, reduced, torch.inf).argmin(1)
    fixed = torch.ones(len(costs), dtype=torch.bool)
    fixed[free] = False
    left = limit - float(costs.gather(1, only[:, None])[fixed].sum())
    base = float(losses.gather(1, only[:, None])[fixed].sum())
    found = _exact(torch.where(open_, costs, torch.inf)[free], losses[free], left, chosen_loss - base, price)
    if found is not None:
        best = only.clone()
        best[free] = found
    return [int(i) for i in best]


def _lagrangian(costs: Tensor, losses: Tensor, limit: float) -> tuple[float, Tensor]:
    """(price of a unit of cost, choice within the limit) of the Lagrangian's dual, by bisection on the price."""
    def choice(price: float) -> Tensor:
        value = losses + price * costs
        value = torch.where(costs.isinf(), torch.inf, value)
        tied = value <= value.amin(1, keepdim=True)
        return torch.where(tied, costs, torch.inf).argmin(1)

    def cost(chosen: Tensor) -> float:
        return float(costs.gather(1, chosen[:, None]).sum())
    free = choice(0.0)
    if cost(free) <= limit:
        return 0.0, free
    high = 1.0
    while cost(choice(high)) > limit and high < 1e300:
        high *= 4
    if cost(choice(high)) > limit:
        return high, costs.argmin(1)
    low = 0.0
    for _ in range(80):
        middle = (low + high) / 2 if low else high / 4
        if middle in (low, high):
            break
        low, high = (middle, high) if cost(choice(middle)) > limit else (low, middle)
    return high, choice(high)


def _filled(costs: Tensor, losses: Tensor, limit: float, chosen: Tensor) -> Tensor:
    """What room is left is used, the best exchange for its cost first."""
    chosen = chosen.clone()
    for _ in range(200):
        here = chosen[:, None]
        gain = losses.gather(1, here) - losses
        more = costs - costs.gather(1, here)
        room = limit - float(costs.gather(1, here).sum())
        rate = torch.where((gain > 0) & (more <= room), gain / more.clamp(min=1e-300), -torch.inf)
        best = int(rate.argmax())
        group, item = divmod(best, costs.shape[1])
        if not float(rate[group, item]) > 0:
            break
        chosen[group] = item
    return chosen


def _exact(costs: Tensor, losses: Tensor, limit: float, beat: float, price: float) -> Tensor | None:
    """The choice with less loss than ``beat``, None where there is none."""
    groups, items = costs.shape
    if not groups:
        return torch.empty(0, dtype=torch.long) if limit >= 0 and beat > 0 else None
    reduced = torch.where(costs.isinf(), torch.inf, losses + price * costs).amin(1)
    ahead = reduced.flip(0).cumsum(0).flip(0)                                # of the groups from each one on
    cheapest = costs.amin(1).flip(0).cumsum(0).flip(0)
    zero = torch.zeros(1)
    ahead, cheapest = torch.cat([ahead, zero]), torch.cat([cheapest, zero])
    spent, lost = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    trail: list[tuple[Tensor, Tensor]] = []
    for group in range(groups):
        total = (spent[:, None] + costs[group]).flatten()
        loss = (lost[:, None] + losses[group]).flatten()
        bound = loss + ahead[group + 1] - price * (limit - total)            # of all choices that begin so
        keep = torch.nonzero((total + cheapest[group + 1] <= limit) & (bound < beat)).flatten()
        if len(keep) > MOST_STATES:
            keep = keep[bound[keep].argsort()[:MOST_STATES]]
        order = keep[loss[keep].argsort(stable=True)]
        order = order[total[order].argsort(stable=True)]                     # by cost, then by loss
        running = loss[order].cummin(0).values
        better = torch.ones(len(order), dtype=torch.bool)
        better[1:] = loss[order][1:] < running[:-1]                          # cheaper ones that lose no more beat the others
        order = order[better]
        if not len(order):
            return None
        trail.append((order // items, order % items))
        spent, lost = total[order], loss[order]
    state = int(lost.argmin())
    if not float(lost[state]) < beat:
        return None
    found = []
    for before, item in reversed(trail):
        found.append(int(item[state]))
        state = int(before[state])
    return torch.tensor(found[::-1])

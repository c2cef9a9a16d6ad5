"""A round as typed data: private histories, everybody's outputs, and each agent's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokendance.prompt.separator import SEPARATOR, join_pieces


@dataclass(frozen=True, slots=True)
class Round:
    """One All-Gather round: agent i reads `private[i] + shared, in order[i] + task`.

    shared: the blocks that every agent reads.
    private: each agent's own blocks; its keys are the members of the round.
    task: what to do now, at the end of every prompt; may be empty.
    order: for agents that do not read `shared` front to back, the indices they read. Indices may
        be left out, for instance that of the agent's own output.
    """

    shared: Sequence[str]
    private: Mapping[str, Sequence[str]]
    task: str = ""
    order: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.private:
            raise ValueError("a round needs at least one agent in `private`")
        for agent, indices in self.order.items():
            if agent not in self.private:
                raise ValueError(f"order names {agent!r}, who is not in `private`")
            if bad := [i for i in indices if not 0 <= i < len(self.shared)]:
                raise ValueError(f"order of {agent!r} names blocks {bad} of {len(self.shared)}")

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(self.private)

    def blocks(self, agent: str) -> list[str]:
        """The blocks of one agent's prompt, in its order. KeyError for a stranger."""
        order = self.order.get(agent, range(len(self.shared)))
        task = [self.task] if self.task else []
        return [*self.private[agent], *(self.shared[i] for i in order), *task]

    def text(self, agent: str, separator: str = SEPARATOR) -> str:
        """One agent's prompt with the separator between its blocks (M1)."""
        return join_pieces(self.blocks(agent), separator)

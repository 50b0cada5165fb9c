"""Why an agent ends by itself."""

from __future__ import annotations

from kernel_depot.errors import DepotError


class AgentError(DepotError):
    """The root of what ends an agent."""

    slug = "agent-failed"
    title = "The agent cannot go on"


class TokenRejected(AgentError):
    """A server that does not take the agent's token: asking again with it would be pointless."""

    slug = "agent-token-rejected"
    title = "The depot refuses the agent's token"
    status = 401


class AgentRunning(AgentError):
    """Another agent looks after this cache."""

    slug = "agent-running"
    title = "An agent runs on this cache already"
    status = 409

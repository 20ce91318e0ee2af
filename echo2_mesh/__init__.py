"""The network of Echo-2, usable without a GPU or a model.

This face is pure: wire types and errors, no trio and no libp2p. The one impure door is
`from echo2_mesh.mesh import open_mesh`.
"""

from echo2_mesh.errors import Echo2Error, LocalError, PeerError, UsageError

__all__ = ["Echo2Error", "LocalError", "PeerError", "UsageError"]

"""How good a draft is: on held-out rows, and in a real server."""
